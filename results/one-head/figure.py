"""Draw the curves of the first page of the docs: `python results/one-head/figure.py`."""

import json
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
RUNS = json.loads((FOLDER / "results.json").read_text())["results"]
CURVES = {
    ("xkfac", "own", "old own"): "task-specific BN",
    ("xkfac", "affine", "old batch"): "gamma and beta fixed, statistics of the test batch",
    ("xkfac", "affine", "old stored"): "gamma and beta fixed",
    ("hierarchical", "fixed", "old stored"): "BN fixed: the default",
    ("xkfac", "shared", "old stored"): "BN learnt and re-centred: the paper",
}


def mean(bn, curvature="", strength=0.0, key="old stored"):
    """Return the mean accuracy over seeds of a point, on the old task and on the new one."""
    own = ("digits", curvature, bn, strength)
    runs = [run["accuracies"] for run in RUNS if own == (run["pair"], run["curvature"], run["bn"], run["strength"])]
    new = "new batch" if key == "old batch" else "new stored"
    return fmean(run[key] for run in runs), fmean(run[new] for run in runs)


figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for (curvature, bn, key), label in CURVES.items():
    points = [mean(bn, curvature, strength, key) for strength in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)]
    axes.plot(*zip(*points, strict=True), "o-", label=label)
for name, mark in (("fine-tuning", "kx"), ("joint training", "k*")):
    axes.plot(*mean(name), mark, label=name, markersize=9)
axes.set(xlabel="old task: digits (%)", ylabel="new task: photographs (%)", xlim=(0, 100), ylim=(5, 37))
axes.grid(alpha=0.3)
figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
figure.savefig(FOLDER.parents[1] / "docs" / "images" / "one-head.svg", metadata={"Date": None})
