"""Packages that are missing, and packages that are there and cannot be imported: the message says which it is."""

import importlib
import sys

import pytest
import timm
import torch

from xkfac.experiments import packages
from xkfac.experiments.data import digits
from xkfac.experiments.data.digits import DataError
from xkfac.experiments.networks import library
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.library import BackboneError
from xkfac.experiments.networks.weights import WeightsError, load_source, save_source
from xkfac.experiments.packages import PackageError, imported

INSTALL = r"pip install 'xkfac\[experiments\]'"


def broken(monkeypatch, package, error):
    """Have every import of a package, and of what is in it, fail with an error."""
    real = importlib.import_module

    def import_module(name, within=None):
        if name.partition(".")[0] == package:
            raise error
        return real(name, within)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_a_package_that_is_missing_is_to_be_installed(monkeypatch):
    with pytest.raises(PackageError, match=f"a plot needs nosuchpackage and it is not installed: {INSTALL}"):
        imported("nosuchpackage.inner", "a plot")
    missing = ModuleNotFoundError("No module named 'nosuchpackage'", name="nosuchpackage")
    broken(monkeypatch, "timm", missing)
    with pytest.raises(
        PackageError, match=f"needs nosuchpackage, which timm imports, and it is not installed: {INSTALL}"
    ):
        imported("timm", "a network")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x'"),
        RuntimeError("it was built for another torch"),
        OSError("failed to map segment"),
        ModuleNotFoundError("No module named 'torchvision._C'", name="torchvision._C"),
    ],
)
def test_a_package_that_is_installed_and_cannot_be_imported_is_not_to_be_installed(monkeypatch, error):
    for package, name in (("torchvision", "resnet18"), ("timm", "timm:test_resnet")):
        with monkeypatch.context() as patch:
            broken(patch, package, error)
            with pytest.raises(BackboneError, match=f"{package}, which is installed but cannot be imported") as caught:
                make_backbone(name, {"a": 2}, seed=0)
        said = str(caught.value)
        assert str(error) in said
        assert "pip install" not in said
        assert said.endswith(f"reinstall torchvision in the build that fits torch {torch.__version__}")


def test_scikit_learn_that_cannot_be_imported_is_not_said_to_be_missing(monkeypatch):
    broken(monkeypatch, "sklearn", ImportError("failed to map segment from shared object"))
    with pytest.raises(
        DataError, match=r"scikit-learn, which is installed but .* \(failed to map .*; reinstall scikit"
    ):
        digits.load("digits", None, validation=10)


def test_operators_that_do_not_load_keep_no_network_from_being_made(monkeypatch):
    """As beside a torch for CPUs alone: torchvision's import fails until its compiled operators have names."""
    real, calls, defined = importlib.import_module, [], []

    def import_module(name, within=None):
        calls.append(name)
        if len(calls) == 1:
            raise RuntimeError("operator torchvision::nms does not exist")
        return real(name, within)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(packages, "_define_operators", lambda: defined.append(True))
    assert imported("timm", "a network") is timm
    assert (calls, defined) == (["timm", "timm"], [True])


def test_operators_are_given_names_once_and_those_that_load_are_left_alone():
    before = torch.ops.torchvision.nms
    packages._define_operators()
    packages._define_operators()
    assert torch.ops.torchvision.nms is before
    assert hasattr(torch.ops.torchvision, "qnms")


def test_a_model_of_timm_needs_torchvision_for_no_message_of_ours(tmp_path, monkeypatch):
    """What weights look like is told by torchvision's models; without them the fault itself is still told."""
    save_source(make_backbone("timm:test_resnet", {"a": 2}, seed=0), tmp_path / "w.safetensors", "a", {})
    net = make_backbone("timm:test_vit", {"a": 2}, seed=0)
    broken(monkeypatch, "torchvision", RuntimeError("it was built for another torch"))
    with pytest.raises(
        WeightsError, match=r"is not of 'timm:test_vit': it .*; name weights of this model, or the model"
    ):
        load_source(net, tmp_path / "w.safetensors", "a")


def test_a_module_that_can_be_imported_is_returned():
    assert library.library("torchvision.models") is sys.modules["torchvision.models"]
