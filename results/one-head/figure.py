"""Draw the curves of the first page of the docs: `python results/one-head/figure.py`."""

import json
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
POINTS = json.loads((FOLDER / "implicit" / "results.json").read_text())["curves"]
CURVES = {
    "own": "task-specific BN",
    "affine, batch": "gamma and beta fixed, statistics of the test batch",
    "paper": "BN learnt and re-centred: the paper",
    "kfac": "the same, K-FAC",
    "default": "BN fixed: the default",
}
STRENGTHS = (1, 3, 10, 30, 100)


def mean(name):
    """Return the mean accuracy over seeds of a point, on the old task and on the new one."""
    return fmean(POINTS[name]["old"]), fmean(POINTS[name]["new"])


figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
for name, label in CURVES.items():
    points = [mean(f"{name} x{strength}") for strength in STRENGTHS if f"{name} x{strength}" in POINTS]
    (line,) = axes.plot(*zip(*points, strict=True), "o-", label=label)
    if name == "default":
        for strength, point in zip(STRENGTHS, points, strict=True):
            axes.annotate(f"x{strength}", point, textcoords="offset points", xytext=(5, -11), fontsize=8)
        axes.plot(
            *mean("default calibrated"), "s", color=line.get_color(), label="the default, calibrated", markersize=8
        )
for name, label, mark in (("fine-tuning", "fine-tuning", "kx"), ("joint", "joint training", "k*")):
    axes.plot(*mean(name), mark, label=label, markersize=9)
axes.set(xlabel="old task: digits (%)", ylabel="new task: photographs (%)", xlim=(0, 103), ylim=(10, 36))
axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
figure.savefig(FOLDER.parents[1] / "docs" / "images" / "one-head.svg", metadata={"Date": None})
