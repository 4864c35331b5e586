"""Joint training, the ceiling of routers: one network learns the training images of all four sets at once.

    python benchmarks/routing_joint.py --data FOLDER --weights resnet50.safetensors --lr 0.1 --device cuda
    python benchmarks/routing_joint.py --choose FOLDER/lr-0.05 FOLDER/lr-0.1 ...

The network knows ImageNet, and learns with a shared BN and the classes of all tasks in one softmax: SGD with momentum
0.9, batches, epochs, half cosine and augmentation of the recipe `imagenet-to-fine-grained-128`. One image in ten of
each class is set aside for validation; the few images of ImageNet come twice per epoch. After every epoch accuracies on
validation images are written, after the last one those on test images. --choose takes the record with the best mean
accuracy over the validation images of the four sets. FOLDER and weights are as in `routing.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from torch import Tensor, nn

from routing import TREES, percent, routing_table, shares, source_network
from xkfac.experiments.data.augmentation import Augmentation, ImageExamples
from xkfac.experiments.data.digits import Part, Parts, batches, stream
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import ManyHeaded
from xkfac.experiments.runs.training import Stepper, make_optimizer

LR_END = 1e-4
ROW = "joint training, one head over all classes"


class Union(nn.Module):
    """A network that answers with the scores of the classes of all tasks."""

    def __init__(self, net: ManyHeaded) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores [N, classes of all tasks] of inputs x."""
        features = self.net.trunk(x)
        return torch.cat([head(features) for head in self.net.heads.values()], 1)


class JointExamples(ImageExamples):
    """The images of all tasks; those of Flowers are cropped, as in the recipe."""

    def __init__(self, parts: list[Part]) -> None:
        self.sizes = [len(part) for part in parts]
        super().__init__(Part(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])),
                         Augmentation(128), augmented=True)  # fmt: skip

    def redraw(self, *key: int) -> None:
        """Draw the crop and the side of each image anew."""
        draws = [
            Augmentation(128, (0.5 if task == "flowers" else 1.0, 1.0)).draw((size,), stream("joint", task, *key))
            for task, size in zip(TREES, self.sizes, strict=True)
        ]
        self._draws.copy_(torch.cat(draws))


def load_images(options: argparse.Namespace) -> dict[str, Parts]:
    trees = ((task, options.data / f"{tree}.zip") for task, tree in TREES.items())
    limit = options.images or None
    return {task: load_pictures(tree, pixels=128, resize="squash", validation=0.1, limit=limit) for task, tree in trees}


def moved(part: Part, offset: int, device: str) -> Part:
    return Part(part.x.to(device), part.y.to(device) + offset)


@torch.no_grad()
def measure(net: Union, parts: dict[str, Part], offsets: list[int]) -> dict[str, Any]:
    """Return by task for which tasks images are taken, and accuracies with the task given and not given."""
    net.eval()
    found, device = {}, next(net.parameters()).device
    for place, (task, part) in enumerate(parts.items()):
        pairs = zip(part.x.split(256), part.y.to(device).split(256), strict=True)
        taken, right, given = [], [], []
        for x, y in pairs:
            scores = net(Augmentation(128).plain(x.to(device)))
            best = scores.argmax(1)
            taken.append(torch.bucketize(best, torch.tensor(offsets[1:], device=device), right=True))
            right.append(best == y + offsets[place])
            own = scores[:, offsets[place] :][:, : net.net.tasks[task]]
            given.append(own.argmax(1) == y)
        found[task] = {
            "taken": shares(torch.cat(taken).cpu(), len(parts)),
            "inferred": percent(torch.cat(right)),
            "given": percent(torch.cat(given)),
        }
    return found


def learn(options: argparse.Namespace) -> None:
    """Train, and write what was measured after every epoch."""
    record, output = provenance(), options.output / f"lr-{options.lr:g}"
    parts = load_images(options)
    net = Union(source_network(options, parts)).requires_grad_(True)
    sizes = list(net.net.tasks.values())
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    train = [moved(of.train, offset, options.device) for of, offset in zip(parts.values(), offsets, strict=True)]
    examples = JointExamples(train)
    twice = torch.cat([torch.arange(len(train[0])), torch.arange(len(examples))])
    autocast = torch.bfloat16 if options.device != "cpu" else None
    stepper = Stepper(net, examples, make_optimizer(net, 0.9), None, autocast=autocast)
    found: dict[str, Any] = {"lr": options.lr, "batch": options.batch, "epochs": options.epochs, "validation": []}
    most = options.tests
    aside = {task: Part(of.validation.x[:most], of.validation.y[:most]) for task, of in parts.items()}
    tests = {task: Part(of.test.x[:most], of.test.y[:most]) for task, of in parts.items()}
    for epoch in range(options.epochs):
        share = (1 + math.cos(math.pi * epoch / max(options.epochs - 1, 1))) / 2
        examples.redraw(epoch)
        order = twice[batches(len(twice), options.batch, seed=0, task=0, epoch=epoch)]
        loss, _ = stepper.epoch(order, LR_END + (options.lr - LR_END) * share)
        rows = measure(net, aside, offsets)
        found["validation"].append({"loss": loss, **{task: row["inferred"] for task, row in rows.items()}})
        if epoch == options.epochs - 1:
            found["routing"] = {ROW: measure(net, tests, offsets)}
        keep(output, record, found, table([found]), show=False)
        print(f"lr {options.lr:g}, epoch {epoch + 1}: {found['validation'][-1]}", flush=True)


def on_validation(found: dict[str, Any]) -> float:
    """Return the mean accuracy over the validation images of the sets after the last epoch."""
    return statistics.fmean(found["validation"][-1][task] for task in TREES)


def table(several: list[dict[str, Any]]) -> str:
    """Return a table of records, by learning rate."""
    names = list(TREES)
    lines = [f"| learning rate | epoch | validation: {', '.join(names)} | mean | test: {', '.join(names)} | mean |"]
    lines.append("|---" * 6 + "|")
    for found in sorted(several, key=lambda one: float(one["lr"])):
        rows = found.get("routing", {}).get(ROW, {})
        cells = []
        for values in ([found["validation"][-1][task] for task in names], [row["inferred"] for row in rows.values()]):
            cells += [", ".join(f"{one:.1f}" for one in values), f"{statistics.fmean(values):.1f}" if values else ""]
        lines.append(f"| {found['lr']:g} | {len(found['validation'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choose(options: argparse.Namespace) -> None:
    """Write all records as one, with the test accuracies of the best learning rate."""
    whole = [json.loads((folder / "results.json").read_text()) for folder in options.choose]
    complete = [one["results"] for one in whole if "routing" in one["results"]]
    best = max(complete, key=on_validation)
    record = {**{key: value for key, value in whole[0].items() if key != "results"},
              "command": [one["command"] for one in whole]}  # fmt: skip
    found = {"chosen": best["lr"], "routing": best["routing"], "learning rates": [one["results"] for one in whole]}
    lines = [table([one["results"] for one in whole]), "", f"The best on validation images: {best['lr']:g}.", ""]
    keep(options.output / "joint", record, found, "\n".join([*lines, routing_table(best["routing"])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=0, help="training images per task, at most; 0 for all")
    parser.add_argument("--tests", type=int, default=10_000, help="validation and test images per task, at most")
    parser.add_argument("--choose", type=Path, nargs="+", help="records, of which the best is taken")
    parser.add_argument("--output", type=Path, default=Path("results/routing/resnet50"))
    options = parser.parse_args()
    if options.choose:
        choose(options)
    else:
        learn(options)


if __name__ == "__main__":
    main()
