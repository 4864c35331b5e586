"""Which curvature keeps a real convolutional network best: ResNet-18 at 64 pixels, from generic images to fine-grained.

    python benchmarks/deep.py --source tiny-imagenet-100.zip --target cub200.zip [--output results/deep]

Source and target are zips with `train/<class>/<image>` and `test/<class>/<image>`. The source network is trained
once (and kept in the output folder), its memory made with each curvature from the same batches, and the target learnt
with each. Nothing is tuned: every curvature gets the same learning rate, damping and number of epochs, and all that
are listed are run. Beside the accuracies: the distance of each curvature from XK-FAC as the paper has it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import zipfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import provenance
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from xkfac.curvature.blocks import Kronecker

VARIANTS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"method": "fine-tuning"},
    "EWC": {"method": "ewc"},
    "diagonal": {"method": "diagonal"},
    "fixed BN": {"method": "fixed-bn", "kind": "kfac", "grouping": "paper"},
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac", "form": "paper"},
    "mean form": {"method": "xkfac", "form": "mean"},
    "pooled": {"method": "xkfac", "form": "mean", "grouping": "pooled"},
    "hierarchical": {"method": "xkfac", "form": "mean", "grouping": "hierarchical"},
    "corrected": {"method": "corrected"},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_part(path: str, names: list[str], size: int) -> Tensor:
    with zipfile.ZipFile(path) as archive:
        images = []
        for name in names:
            picture = Image.open(io.BytesIO(archive.read(name))).convert("RGB").resize((size, size))
            images.append(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(size, size, 3))
    return torch.stack(images).permute(0, 3, 1, 2).contiguous()


def read_zip(path: Path, size: int, workers: int, limit: int | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images [N, 3, size, size] as bytes and labels [N] of the train and test parts, decoded once."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.count("/") == 2 and not name.endswith("/"))
    classes = sorted({name.split("/")[1] for name in names})
    parts = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for part in ("train", "test"):
            chosen = [name for name in names if name.startswith(f"{part}/")][:: 1 if limit is None else -1][:limit]
            chunks = [chosen[i::workers] for i in range(workers)]
            images = list(pool.map(read_part, [str(path)] * workers, chunks, [size] * workers))
            labels = [torch.tensor([classes.index(name.split("/")[1]) for name in chunk]) for chunk in chunks]
            parts[part] = torch.cat(images), torch.cat(labels)
    return parts


def prepared(images: Tensor, augment: bool) -> Tensor:
    x = images.to(DEVICE).float().div_(255).sub_(0.45).div_(0.25)
    if augment:
        flip = torch.rand(len(x), 1, 1, 1, device=DEVICE) < 0.5
        x = torch.where(flip, x.flip(3), x)
        dy, dx = torch.randint(0, 9, (2,)).tolist()
        x = F.pad(x, (4, 4, 4, 4), mode="reflect")[:, :, dy : dy + images.shape[2], dx : dx + images.shape[3]]
    return x.contiguous(memory_format=torch.channels_last)


class Loader:
    """Shuffled full batches of prepared images."""

    def __init__(self, part: tuple[Tensor, Tensor], batch: int, augment: bool, count: int | None = None) -> None:
        self.images, self.labels = (tensor.to(DEVICE) for tensor in part)
        self.batch, self.augment, self.count = batch, augment, count

    def __len__(self) -> int:
        return self.count or len(self.images) // self.batch

    def __iter__(self):  # noqa: ANN204
        order = torch.randperm(len(self.images)).to(DEVICE)
        for index in order.split(self.batch)[: len(self)]:
            yield prepared(self.images[index], self.augment), self.labels[index]


def network(classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 without its max-pool, which 64 pixels are too few for."""
    from torchvision.models import resnet18

    net = resnet18(num_classes=classes)
    net.maxpool = nn.Identity()
    return net.to(DEVICE, memory_format=torch.channels_last)


def accuracy(net: nn.Module, part: tuple[Tensor, Tensor]) -> float:
    net.eval()
    images, labels = part
    with torch.no_grad():
        right = sum(
            int((net(prepared(x, False)).argmax(1) == y.to(DEVICE)).sum())
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    return 100 * right / len(images)


def pretrain(net: nn.Module, loader: Loader, epochs: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * len(loader))
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def learn(state: Path, variant: str, strength: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make the memory with one curvature, learn the target, and return the accuracies."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    saved = torch.load(state, weights_only=True)
    net = network(saved["classes"])
    net.load_state_dict(saved["net"])
    source, target = (saved[name] for name in ("source", "target"))
    torch.manual_seed(seed)
    curvature_loader = Loader(source["train"], options.batch, False, options.curvature_batches)
    memory = xkfac.consolidate(net, curvature_loader, exclude=["fc"], **VARIANTS[variant])
    source_head = net.fc
    net.fc = nn.Linear(net.fc.in_features, int(target["train"][1].max()) + 1).to(DEVICE)
    torch.manual_seed(seed)
    nn.init.normal_(net.fc.weight, std=0.01)
    loader = Loader(target["train"], options.batch, True)
    learner = xkfac.Learner(net, memory, damping=options.damping, strength=strength)
    learner.begin(loader)
    optimizer = torch.optim.SGD(net.parameters(), options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader), eta_min=1e-4)
    net.train()
    with contextlib.suppress(xkfac.NotFiniteError):  # a row that diverges shows what it ends with
        for _ in range(options.epochs):
            for x, y in loader:
                objective = learner.objective(F.cross_entropy(net(x), y))
                optimizer.zero_grad()
                objective.backward()
                optimizer.step()
                schedule.step()
    learner.close()
    result = {"variant": variant, "strength": strength, "seed": seed, "penalty": learner.last_penalty.item()}
    result["target"] = accuracy(net, target["test"])
    net.fc = source_head
    result["source"] = accuracy(net, source["test"])
    print(json.dumps(result), flush=True)
    return result


def distance(ours: Kronecker, theirs: Kronecker) -> float:
    """Return |ours - theirs| / |theirs| in the Frobenius norm, by inner products of the factors."""

    def inner(a: Kronecker, b: Kronecker) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=a.terms[0].right.device)
        for s in a.terms:
            for t in b.terms:
                left = (s.dense_left.double() * t.dense_left.double()).sum((1, 2))
                total = total + (left * (s.right.double() * t.right.double()).sum((1, 2))).sum()
        return total

    square = inner(ours, ours) - 2 * inner(ours, theirs) + inner(theirs, theirs)
    return (square.clamp(min=0) / inner(theirs, theirs)).sqrt().item()


def distances(net: nn.Module, loader: Loader) -> dict[str, dict[str, float]]:
    """Return by unit how far each curvature is from XK-FAC as the paper has it, over the same batches and labels."""
    data = list(loader)
    curvatures = {
        name: xkfac.consolidate(net, data, exclude=["fc"], **VARIANTS[name]).curvature.blocks
        for name in ("XK-FAC", "K-FAC", "mean form", "pooled", "hierarchical")
    }
    reference = curvatures.pop("XK-FAC")
    return {
        unit: {name: distance(blocks[unit], reference[unit]) for name, blocks in curvatures.items()}
        for unit in reference
    }


def tables(record: dict[str, Any]) -> str:
    lines = [f"Source network: {record['before']:.1f}% before.", ""]
    lines += ["| curvature | penalty times | source | target | runs |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in sorted(record["runs"], key=lambda run: (run["strength"], list(VARIANTS).index(run["variant"]))):
        groups.setdefault((run["variant"], run["strength"]), []).append(run)
    for (variant, strength), runs in groups.items():
        cells = []
        for part in ("source", "target"):
            values = [run[part] for run in runs]
            cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}")
        lines.append(f"| {variant} | {strength:g} | {cells[0]} | {cells[1]} | {len(runs)} |")
    names = list(next(iter(record["distances"].values())))
    lines += ["", "| distance to XK-FAC | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for what, choose in (("median over units", statistics.median), ("largest", max)):
        cells = [f"{choose([unit[name] for unit in record['distances'].values()]):.3f}" for name in names]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/deep"))
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--limit", type=int, help="read only so many images of each part (for a trial)")
    parser.add_argument("--source-epochs", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--damping", type=float, default=1e-4)
    parser.add_argument("--curvature-batches", type=int, default=300)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args()
    record: dict[str, Any] = {**provenance(), "options": {k: str(v) for k, v in vars(options).items()}}
    options.output.mkdir(parents=True, exist_ok=True)
    state = options.output / "source.pt"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if not state.exists():
        data = {
            part: read_zip(getattr(options, part), options.pixels, options.jobs, options.limit)
            for part in ("source", "target")
        }
        classes = int(data["source"]["train"][1].max()) + 1
        torch.manual_seed(0)
        net = network(classes)
        pretrain(net, Loader(data["source"]["train"], 256, True), options.source_epochs)
        torch.save({"net": net.state_dict(), "classes": classes, **data}, state)
    saved = torch.load(state, weights_only=True)
    net = network(saved["classes"])
    net.load_state_dict(saved["net"])
    record["before"] = accuracy(net, saved["source"]["test"])
    print(f"source network: {record['before']:.1f}%", flush=True)
    loader = Loader(saved["source"]["train"], options.batch, False, 20)
    record["distances"] = distances(net, loader)
    unpenalised = ("fine-tuning",)
    jobs = [
        (state, variant, strength, seed, options)
        for strength in options.strengths
        for variant in options.variants
        if not (variant in unpenalised and strength != options.strengths[0])
        for seed in range(options.seeds)
    ]
    record["runs"] = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(learn, *job) for job in jobs]):
            record["runs"].append(future.result())
            (options.output / "results.json").write_text(json.dumps(record, indent=1))
    text = tables(record)
    (options.output / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
