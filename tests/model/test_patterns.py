"""Patterns that a message offers exclude what is named and nothing else."""

import pytest
import torch
from torch import nn

import xkfac
from xkfac.model.patterns import excluded_names, patterns_for


def nested(*paths):
    """Return a model that has a BN at each path, and a linear layer in front of it."""
    model = nn.Module()
    for path in paths:
        place = model
        *folders, name = path.split(".")
        for folder in folders:
            if not hasattr(place, folder):
                place.add_module(folder, nn.Module())
            place = getattr(place, folder)
        place.add_module(name, nn.BatchNorm1d(2))
        place.add_module(f"{name}_linear", nn.Linear(2, 2))
    return model


@pytest.mark.parametrize(
    ("refused", "others", "expected"),
    [
        (["a.bn"], ["b.bn"], ["a.bn"]),
        (["a.0.bn", "a.1.bn", "a.1.x.bn"], ["b.0.bn"], ["a.*.bn"]),
        (["bn1", "x.bn2"], [], ["bn1", "x.bn2"]),  # "*" alone would exclude the linear layers
        (["a.0.bn1", "a.1.bn1", "a.0.bn2"], ["a.1.bn2"], ["a.*.bn1", "a.0.bn2"]),
        (["a.0.bn", "a.2.bn"], ["a.1.bn"], ["a.0.bn", "a.2.bn"]),
        (["a.0.x.bn", "a.1.y.bn"], ["a.2.z.bn"], ["a.0.x.bn", "a.1.y.bn"]),
        (["bn", "x.bn"], ["y.bn"], ["bn", "x.bn"]),
    ],
)
def test_patterns_exclude_what_they_are_for(refused, others, expected):
    model = nested(*refused, *others)
    found = patterns_for(model, refused)
    assert found == expected
    names = {name for path in refused for name in (path, f"{path}.weight", f"{path}.bias")}
    assert excluded_names(model, found) == names


class Faulty(nn.Module):
    """Calls one BN twice and keeps no statistics in two others."""

    def __init__(self):
        super().__init__()
        self.twice = nn.BatchNorm1d(3)
        self.bare = nn.ModuleList([nn.BatchNorm1d(3, track_running_stats=False) for _ in range(2)])
        self.good = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.good(self.bare[1](self.bare[0](self.twice(self.twice(x)))))


def test_each_kind_of_fault_is_said_once_and_every_layer_is_named():
    with pytest.raises(xkfac.UnitError) as caught:
        xkfac.find_units(Faulty(), torch.randn(4, 3))
    assert str(caught.value) == (
        "'twice' is called 2 times in one forward pass, so it has 2 merged weights; give each call a BN of its own; "
        "'bare.0' has no running statistics, so it has no anchor; build it with track_running_stats=True; or add "
        "['twice', 'bare.*'] to exclude, which leaves out all 3 BN layers that are refused: 'twice', 'bare.0', 'bare.1'"
    )
    assert [unit.name for unit in xkfac.find_units(Faulty(), torch.randn(4, 3), exclude=["twice", "bare.*"]).units] == [
        "good"
    ]


def test_all_patterns_that_match_nothing_are_named():
    with pytest.raises(xkfac.UnitError) as caught:
        excluded_names(nested("layer.bn"), ["layr", "layer", "zzz"])
    assert str(caught.value) == (
        "exclude: 'layr' matches no parameter of the model (did you mean 'layer'?); 'zzz' matches no parameter of the "
        "model"
    )
