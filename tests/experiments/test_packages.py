"""Packages that cannot be imported, for whatever reason."""

import importlib
import sys

import pytest
import timm
import torch

from xkfac.experiments import packages
from xkfac.experiments.data import digits
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.packages import PackageError, imported


def broken(monkeypatch, package, error):
    """Have every import of a package, and of what is in it, fail with an error."""
    real = importlib.import_module

    def import_module(name, within=None):
        if name.partition(".")[0] == package:
            raise error
        return real(name, within)

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x'"),
        RuntimeError("it was built for another torch"),
        OSError("failed to map segment"),
        ModuleNotFoundError("No module named 'torchvision'", name="torchvision"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_the_reason_and_the_remedy(monkeypatch, error):
    for package, name in (("torchvision", "resnet18"), ("timm", "timm:test_resnet")):
        with monkeypatch.context() as patch:
            broken(patch, package, error)
            with pytest.raises(PackageError, match=f"{package}, which cannot be imported") as caught:
                make_backbone(name, {"a": 2}, seed=0)
        assert str(error) in str(caught.value)
        assert "pip install 'xkfac[experiments]'" in str(caught.value)
        assert str(caught.value).endswith(f"torchvision in the build for torch {torch.__version__}")


def test_packages_are_called_by_the_names_they_are_installed_by(monkeypatch):
    broken(monkeypatch, "sklearn", ImportError("failed to map segment from shared object"))
    with pytest.raises(PackageError, match=r"scikit-learn, which cannot be imported \(failed to map"):
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


def test_a_module_that_can_be_imported_is_returned():
    assert imported("torchvision.models", "a network") is sys.modules["torchvision.models"]
