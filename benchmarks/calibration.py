"""How steady the calibrated scale is, what it is worth, and what it is for an ImageNet network; the default method.

    python benchmarks/calibration.py [--output results/calibration]
    python benchmarks/calibration.py --imagenet FOLDER --model resnet50 [--device cuda] [--output ...]

The first command: a perceptron and a small convolutional network learn 1,000 of scikit-learn's digits. Their memory is
calibrated on 400 others with other seeds, from a three times larger learning rate, and with four times as many steps.
Then the convolutional network learns changed digits for 100 steps with SGD that `begin` was given (momentum 0.9,
cosine), at several learning rates: with strength 1, with the calibrated one, and with the calibrated one raised as the
learner does by default where steps go too far; accuracies on the other 397 digits.

The second: FOLDER holds `imagenet1000-128.zip` and MODEL-imagenet-128.safetensors (or .xz). Prints the calibration, and
what the scale would be if it were read at other rises of the loss than 0.1 nats: --rises (paths go on to the largest),
which the small networks take too, then instead of all else.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import lzma
import statistics
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
from common import batches, convnet, digits, keep, mlp, provenance
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from xkfac import calibration as calibration_module
from xkfac.experiments.networks.library import library_model
from xkfac.learning import calibrator

Batches = list[tuple[Tensor, Tensor]]
STEPS = 100
VARIANTS = {"as it is": (0, 0.2, 8), "other seeds": (10, 0.2, 8), "lr x 3": (0, 0.6, 8), "32 steps": (0, 0.2, 32)}


def learn(net: nn.Module, examples: Batches, steps: int, lr: float, learner: xkfac.Learner | None) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if learner is not None:
        learner.begin(examples, optimizer)
    net.train()
    for step in range(steps):
        x, y = examples[step % len(examples)]
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        (loss if learner is None else learner.objective(loss)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100 * (net.eval()(x).argmax(1) == y).double().mean().item()


def steadiness(net: nn.Module, memory: xkfac.Memory, held_out: Batches) -> dict[str, list[float]]:
    """Return the scales of the made-up tasks for each variant of the calibration."""
    found = {}
    for name, (seed, calibrator.LR, calibrator.SHORTEST) in VARIANTS.items():
        calibration = xkfac.calibrate(net, memory, held_out, seed=seed).calibration
        assert calibration is not None
        found[name] = [calibration.scale, *calibration.scales]
    calibrator.LR, calibrator.SHORTEST = 0.2, 8
    return found


def worth(net: nn.Module, memory: xkfac.Memory, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Return accuracies on source and target after learning changed digits, and the strength that the learner found."""
    assert memory.calibration is not None
    strengths = {"strength 1": 1.0, "calibrated": memory.calibration.scale, "default": None}
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    targets = {"permuted": x.flatten(1)[:, order].view_as(x), "inverted": 1 - x, "mirrored": x.flip(3)}
    rows = []
    for name, changed in targets.items():
        for lr in (0.01, 0.05, 0.2):
            row: dict[str, Any] = {"target": name, "lr": lr}
            for key in ("fine-tuning", *strengths):
                made = copy.deepcopy(net)
                learner = xkfac.Learner(made, memory, strength=strengths[key]) if key in strengths else None
                try:
                    learn(made, batches(changed[:1000], y[:1000], 50, 0), STEPS, lr, learner)
                    row[key] = [accuracy(made, one[1400:], y[1400:]) for one in (x, changed)]
                except xkfac.NotFiniteError:
                    row[key] = None
            assert learner is not None
            row["strength"] = learner.strength
            rows.append(row)
    return rows


def networks() -> Iterator[tuple[str, nn.Module, xkfac.Memory, Batches, Tensor, Tensor]]:
    """Yield names of small networks, what has learnt digits, its memory, the held-out batches, and all digits."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", xkfac.XkfacWarning)
    x, y = digits()
    for name, make in (("perceptron", mlp), ("convolutions", convnet)):
        torch.manual_seed(0)
        net = make()
        learn(net, batches(x[:1000], y[:1000], 50, 0), 400, 0.1, None)
        held_out = batches(x[1000:1400], y[1000:1400], 50, 0)
        yield name, net, xkfac.consolidate(net, held_out), held_out, x, y


def rises(options: argparse.Namespace) -> None:
    record: dict[str, Any] = {}
    lines = ["| network | " + " | ".join(f"{rise:g} nats" for rise in options.rises) + " |"]
    lines.append("|---" * (1 + len(options.rises)) + "|")
    for name, net, memory, held_out, *_ in networks():
        with by_rise(options.rises) as scales:
            xkfac.calibrate(net, memory, held_out)
        record[name] = scales
        lines.append(f"| {name} | " + " | ".join(map(shown, scales.values())) + " |")
    keep(options.output, provenance(), record, "\n".join(lines))


def shown(scales: list[float]) -> str:
    return f"{statistics.geometric_mean(scales):.3g} ({min(scales):.3g} to {max(scales):.3g})"


def small(output: Path) -> None:
    lines = ["| network | " + " | ".join(VARIANTS) + " |", "|---" * (1 + len(VARIANTS)) + "|"]
    record: dict[str, Any] = {}
    for name, net, memory, held_out, x, y in networks():
        record[name] = {"before": accuracy(net, x[1400:], y[1400:]), "scales": steadiness(net, memory, held_out)}
        cells = [
            f"{scale:.2f} ({min(all_):.2f} to {max(all_):.2f})" for scale, *all_ in record[name]["scales"].values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    rows = worth(net, xkfac.calibrate(net, memory, held_out), x, y)
    keys = ("fine-tuning", "strength 1", "calibrated", "default")
    lines += ["", f"convolutions, source {record[name]['before']:.1f}% before; source / target:", ""]
    lines += ["| target | lr | " + " | ".join(keys) + " | raised to |", "|---" * 7 + "|"]
    for row in rows:
        cells = ["diverged" if row[key] is None else "{:.0f} / {:.0f}".format(*row[key]) for key in keys]
        lines.append(f"| {row['target']} | {row['lr']} | " + " | ".join(cells) + f" | {row['strength']:.3g} |")
    keep(output, {**provenance(), **record}, rows, "\n".join(lines))


def images(archive: Path, count: int) -> Tensor:
    """Return some images of all classes of the archive's `train` part, as the networks take them."""
    found = []
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.startswith("train/") and not name.endswith("/"))
        for place in torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:count].tolist():
            image = Image.open(io.BytesIO(file.read(names[place]))).convert("RGB")
            found.append(torch.from_numpy(numpy.array(image)).permute(2, 0, 1))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (torch.stack(found).float() / 255 - mean[:, None, None]) / std[:, None, None]


def imagenet(options: argparse.Namespace) -> None:
    net = library_model(options.model)
    path = options.imagenet / f"{options.model}-imagenet-128.safetensors"
    raw = path.read_bytes() if path.exists() else lzma.decompress(path.with_suffix(".safetensors.xz").read_bytes())
    net.load_state_dict(safetensors.torch.load(raw))
    net.to(options.device).eval()
    x = images(options.imagenet / "imagenet1000-128.zip", options.images)
    held_out = [(one,) for one in x.split(options.batch) if len(one) == options.batch]
    began = time.perf_counter()
    memory = xkfac.consolidate(net, held_out, draws=options.draws, forward=lambda model, batch: model(batch[0]))
    consolidated = time.perf_counter()
    with by_rise(options.rises or [calibration_module.RISE]) as scales:
        calibration = xkfac.calibrate(net, memory, held_out).calibration
    took = consolidated - began, time.perf_counter() - consolidated
    print(f"{options.model}: {calibration}; {took[0]:.0f} s to consolidate, {took[1]:.0f} s to calibrate")
    for rise, found in scales.items():
        print(f"read at {rise} nats: {shown(found)}")


@contextlib.contextmanager
def by_rise(rises: list[float]) -> Iterator[dict[float, list[float]]]:
    """Let the paths of calibrations go on to the largest rise, and note the scale of every path at each of them."""
    scales: dict[float, list[float]] = {rise: [] for rise in rises}
    measured, usual = calibrator._measured, calibration_module.RISE

    def noted(*arguments: Any) -> Any:
        curve, lr = measured(*arguments)
        for rise, found in scales.items():
            calibration_module.RISE = rise
            found.append(calibration_module.scale_of(curve))
        calibration_module.RISE = usual
        return curve, lr

    calibrator._measured, calibrator.RISE = noted, max(rises)
    try:
        yield scales
    finally:
        calibrator._measured, calibrator.RISE = measured, usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imagenet", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--draws", type=int, help="of labels per batch, by default the library's choice")
    parser.add_argument("--rises", type=float, nargs="+", default=[])
    parser.add_argument("--output", type=Path, default=Path("results/calibration"))
    options = parser.parse_args()
    if options.imagenet:
        imagenet(options)
    elif options.rises:
        rises(options)
    else:
        small(options.output)


if __name__ == "__main__":
    main()
