"""Every script in examples/ runs as it stands, and keeps more of the source than plain fine-tuning does.

Calibration, most of the time of these scripts, takes one round here, and all of them in `make examples`.
"""

import functools
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

import xkfac
from tests.helpers.made_up_images import load, make_tree, short_calibrations, source_network
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.networks.weights import save_source

EXAMPLES = Path(__file__).parent.parent / "examples"
IMAGENET = EXAMPLES / "imagenet_to_cars.py"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "digits.py" and path != IMAGENET)
FRAMEWORKS = ("lightning", "transformers", "accelerate", "avalanche", "laplace")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    if "WHOLE_EXAMPLES" not in os.environ:
        monkeypatch.setattr(xkfac, "calibrate", functools.partial(xkfac.calibrate, tasks=1))
    try:
        names = runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        if error.name not in FRAMEWORKS:
            raise
        pytest.skip(f"needs {error.name}")
    if script.stem == "resuming":
        assert names["same"]
    elif script.stem == "uncertainty":
        among, gap, away = names["deviations"]
        assert min(gap, away) > 3 * among
    elif script.stem == "regression":
        assert names["kept"] < 0.3 * names["forgetful"]
    else:
        assert names["kept"] > names["forgetful"] + 2


@pytest.mark.filterwarnings("ignore:the penalty without damping")
def test_the_ten_lines_learn_a_tree_and_keep_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, (name, classes) in enumerate({"old": 3, "new": 4}.items()):
        make_tree(tmp_path / name, [f"{name}-{label}" for label in range(classes)], train=24, test=8, seed=seed)
    network, parts = source_network("timm:test_resnet", {"old": 3}), load(tmp_path / "old", pixels=16)
    with torch.no_grad():  # a head by least squares, so that there is something to forget
        x = network.trunk(Augmentation(16).plain(parts.train.x))
        head, middle = network.head("old"), x.mean(0)
        targets = 8 * torch.nn.functional.one_hot(parts.train.y).float()
        head.weight.copy_(torch.linalg.lstsq(x - middle, targets - targets.mean(0), driver="gelsd").solution.T)
        head.bias.copy_(-head.weight @ middle)
    save_source(network, tmp_path / "old.safetensors", "old", {})
    trees = [
        "--data",
        str(tmp_path),
        "--source",
        "old",
        "--target",
        "new",
        "--weights",
        str(tmp_path / "old.safetensors"),
    ]
    settings = ["--model", "timm:test_resnet", "--pixels", "16", "--epochs", "4", "--lr", "0.02", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(IMAGENET), *trees, *settings])
    monkeypatch.setattr(xkfac, "consolidate", functools.partial(xkfac.consolidate, draws=2))
    with short_calibrations():
        names = runpy.run_path(str(IMAGENET), run_name="__main__")
    (known, new), (kept, learnt) = names["before"], names["after"]
    assert known > 80
    assert kept > 60  # by chance 33
    assert learnt > new + 40
    assert names["memory"].tasks == 2
    assert torch.equal(names["model"].fc.of["source"].weight, head.weight)
