"""Two tasks of digits, a network with batch normalization: fine-tuning forgets the first, XK-FAC does not.

    python examples/digits.py [--output demo-output]

The data is scikit-learn's digits; the second task permutes their pixels. Every method starts from the same source
network and learns the target with the same optimizer, epochs and damping. The memory is made from held-out source
examples: on examples that a network was trained on it is too sure of itself, and its Fisher too small. Ends with a
table, a figure and a report.
"""

from __future__ import annotations

import argparse
import base64
import copy
import html
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from torch import Tensor, nn

import xkfac

METHODS = {"fine-tuning": "fine-tuning", "EWC": "ewc", "fixed BN": "fixed-bn", "K-FAC": "kfac", "XK-FAC": "xkfac"}
COLOURS = dict(zip(METHODS, ("#D55E00", "#E69F00", "#999999", "#56B4E9", "#0072B2"), strict=True))
MARKERS = dict(zip(METHODS, "osv^D", strict=True))
Part = tuple[Tensor, Tensor]
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>xkfac on two tasks of digits</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; background: white }}
.wide {{ overflow-x: auto }}
td {{ padding: .2rem .8rem; text-align: right; white-space: nowrap }}
td:first-child {{ text-align: left }}
thead td {{ border-bottom: 1px solid; font-weight: 600 }}
</style>
<h1>Two tasks of digits</h1>
<p>{text}</p>
<div class="wide"><table><thead><tr>{head}</tr></thead>{body}</table></div>
<p><img alt="accuracy on both tasks against epochs" src="data:image/png;base64,{image}"></p>
<p><small>{notes}</small></p>
</html>
"""


def task(permutation: Tensor | None = None) -> list[Part]:
    """Return 1000 training, 400 held-out and 397 test digits, pixels [N, 64] in [0, 1] and labels [N]."""
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    if permutation is not None:
        pixels = pixels[:, permutation]
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    return [(pixels[part], labels[part]) for part in order.split([1000, 400, 397])]


def batches(part: Part, seed: int = 0) -> list[Part]:
    """Return shuffled batches of 32; the last may be shorter."""
    order = torch.randperm(len(part[0]), generator=torch.Generator().manual_seed(seed))
    return [(part[0][index], part[1][index]) for index in order.split(32)]


def network() -> nn.Sequential:
    """Return the 64-128-128-10 perceptron with BN before each ReLU."""
    layers: list[nn.Module] = []
    for inputs in (64, 128):
        layers += [nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def accuracy(net: nn.Module, part: Part) -> float:
    """Return the percentage of examples that are classified rightly."""
    with torch.no_grad():
        return 100 * (net.eval()(part[0]).argmax(1) == part[1]).float().mean().item()


def train(net: nn.Module, part: Part, tests: list[Part], learner: xkfac.Learner | None, epochs: int) -> list[Any]:
    """Train by SGD and return the accuracies on all tests before and after each epoch."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    history = [[accuracy(net, test) for test in tests]]
    for epoch in range(epochs):
        net.train()
        for x, y in batches(part, epoch)[:-1]:
            loss = F.cross_entropy(net(x), y)
            if learner is not None:
                loss = learner.objective(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        history.append([accuracy(net, test) for test in tests])
    return history


def run(seed: int, epochs: int) -> dict[str, list[Any]]:
    """Return, for every method, the accuracies on source and target after each epoch of the target task."""
    torch.manual_seed(seed)
    source, target = task(), task(torch.randperm(64))
    net = network()
    train(net, source[0], [source[2]], None, epochs)
    histories = {}
    for name, method in METHODS.items():
        learning = copy.deepcopy(net)
        memory = xkfac.consolidate(learning, batches(source[1]), method)
        learner = xkfac.Learner(learning, memory, damping=1e-4)
        learner.begin(batches(target[0]))
        histories[name] = train(learning, target[0], [source[2], target[2]], learner, epochs)
        learner.finish(batches(target[1]))
        if sys.stderr.isatty():
            print(f"\rseed {seed}: {name:12s}", end="", file=sys.stderr, flush=True)
    return histories


def rows(runs: list[dict[str, list[Any]]]) -> list[list[str]]:
    """Return the table: means and standard deviations over seeds."""

    def cell(values: list[float]) -> str:
        return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"

    table = [["method", "source before", "source after", "forgotten", "target"]]
    for name in METHODS:
        before, after = ([run[name][end][0] for run in runs] for end in (0, -1))
        forgotten = [a - b for a, b in zip(before, after, strict=True)]
        table.append([name, cell(before), cell(after), cell(forgotten), cell([run[name][-1][1] for run in runs])])
    return table


def draw(runs: list[dict[str, list[Any]]], path: Path) -> None:
    """Draw source and target accuracy against epochs of the target task, with bands of one standard deviation."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for place, (axis, title) in enumerate(zip(axes, ("first task (source)", "second task (target)"), strict=True)):
        for name in METHODS:
            values = torch.tensor([[epoch[place] for epoch in run[name]] for run in runs])
            mean, spread = values.mean(0), values.std(0)
            axis.plot(mean, color=COLOURS[name], marker=MARKERS[name], label=name)
            axis.fill_between(range(len(mean)), mean - spread, mean + spread, color=COLOURS[name], alpha=0.15, lw=0)
        axis.set(title=title, xlabel="epochs of the second task", ylim=(0, 101))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[1].legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(table: list[list[str]], figure: Path, path: Path, notes: str) -> None:
    """Write a self-contained HTML page with the table and the figure."""
    head, *body = (["".join(f"<td>{html.escape(cell)}</td>" for cell in row)] for row in table)
    text = html.escape(" ".join((__doc__ or "").split("demo-output]")[-1].split()))
    path.write_text(
        PAGE.format(
            text=text,
            head=head[0],
            body="".join(f"<tr>{row[0]}</tr>" for row in body),
            image=base64.b64encode(figure.read_bytes()).decode(),
            notes=html.escape(notes),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--seeds", type=int, default=5, help="number of repeats, at least 2")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    if options.seeds < 2 or options.epochs < 1:
        parser.error("--seeds must be at least 2 and --epochs at least 1")
    start = time.monotonic()
    runs = [run(seed, options.epochs) for seed in range(options.seeds)]
    table = rows(runs)
    options.output.mkdir(parents=True, exist_ok=True)
    figure, page = options.output / "digits.png", options.output / "report.html"
    draw(runs, figure)
    notes = (
        f"xkfac {xkfac.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"seeds 0 to {options.seeds - 1}, {options.epochs} epochs, {time.monotonic() - start:.0f} s"
    )
    report(table, figure, page, notes)
    if sys.stderr.isatty():
        print("\r" + " " * 40, end="\r", file=sys.stderr)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"\naccuracy in %, mean ± standard deviation; {notes}\nfigure: {figure}\nreport: {page}")


if __name__ == "__main__":
    main()
