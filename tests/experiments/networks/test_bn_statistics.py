"""BN statistics for images of another size, against those of the layer's own inputs."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.made_up_images import CLASSES, make_tree
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.bn_statistics import estimate_statistics
from xkfac.experiments.networks.weights import WeightsError, load_source, save_source

MODEL = "timm:test_resnet"


def test_statistics_are_those_of_all_training_images_and_all_else_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "cache"))
    tree = make_tree(tmp_path / "tree", train=5, size=(24, 24))
    network = make_backbone(MODEL, {"old": len(CLASSES)}, seed=1)
    save_source(network, tmp_path / "before.safetensors", "old", {"epochs": 3})
    estimate_statistics(MODEL, tmp_path / "before.safetensors", tmp_path / "after.safetensors", tree=tree, pixels=16)
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".running_" in name or name.endswith("num_batches_tracked") for name in changed)

    pictures = load_pictures(tree, pixels=16, resize="squash", validation=0.0).train
    inputs = Augmentation(16, (1.0, 1.0)).plain(pictures.x).double()
    outputs = network.double().trunk.conv1(inputs).transpose(0, 1).flatten(1)
    torch.testing.assert_close(after["bn1.running_mean"].double(), outputs.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after["bn1.running_var"].double(), outputs.var(1), rtol=1e-4, atol=1e-5)
    again = make_backbone(MODEL, {"old": len(CLASSES)}, seed=2)
    assert load_source(again, tmp_path / "after.safetensors", "old")["epochs"] == 3


def test_weights_that_do_not_fit_are_named(tmp_path):
    tree = make_tree(tmp_path / "tree", train=2, test=1)
    network = make_backbone(MODEL, {"old": 2}, seed=1)
    save_source(network, tmp_path / "before.safetensors", "old", {})
    with pytest.raises(WeightsError, match="has a classifier of 2 classes, and task 'source' has 3"):
        estimate_statistics(
            MODEL, tmp_path / "before.safetensors", tmp_path / "after.safetensors", tree=tree, pixels=16
        )
