"""The curvature averaged over weights with noise."""

import copy

import pytest
import torch
from torch import nn

import xkfac


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    model(torch.randn(20, 4, dtype=torch.float64))
    return model


def batches(count):
    return list(torch.randn(count, 6, 4, dtype=torch.float64))


def noted(seen):
    """Return a forward function that notes the weights it runs with."""

    def forward(model, batch):
        with torch._C.DisableTorchFunction():  # units are found from the functions that a forward pass calls
            seen.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        return model(batch)

    return forward


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_the_curvature_is_the_average_over_the_networks_with_noise(kind):
    model, data, seen = net(), batches(3), []
    options = {"kind": kind, "labels": "exact", "statistics": "population"}
    found = xkfac.estimate(model, data, **options, noise=0.3, forward=noted(seen)).curvature
    expected = []
    for weights, batch in zip(seen[-3:], data, strict=True):
        other = copy.deepcopy(model)
        other.load_state_dict(weights)
        expected.append(dict(_tensors(xkfac.estimate(other, [batch], **options).curvature)))
    for name, tensor in _tensors(found):
        torch.testing.assert_close(tensor, torch.stack([one[name] for one in expected]).mean(0))


def _tensors(curvature):
    return ((f"{unit} {place}", tensor) for place, (unit, tensor) in enumerate(curvature.tensors()))


def test_noise_is_of_its_size_drawn_per_batch_by_the_seed_and_gone_afterwards():
    model, data, seen = net(), batches(100), []
    before = copy.deepcopy(model.state_dict())
    first = xkfac.estimate(model, data, noise=0.5, draws=1, forward=noted(seen), seed=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, tensor in before.items():
        drawn = torch.stack([weights[name] for weights in seen[-100:]]).double()
        if tensor.dim() < 2:
            assert (drawn == tensor).all()
            continue
        noise = (drawn - tensor) / tensor.square().mean().sqrt()
        assert noise.std().item() == pytest.approx(0.5, rel=0.06)
        assert noise.mean().item() == pytest.approx(0, abs=0.06)
    again, other = (xkfac.estimate(model, data, noise=0.5, draws=1, seed=seed) for seed in (3, 4))
    pairs = list(zip(first.curvature.tensors(), again.curvature.tensors(), other.curvature.tensors(), strict=True))
    assert all(torch.equal(a, b) for (_, a), (_, b), _ in pairs)
    assert any(not torch.equal(a, c) for (_, a), _, (_, c) in pairs)


def test_weights_come_back_after_an_error_and_the_anchor_has_no_noise():
    model, data = net(), batches(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(xkfac.XkfacError, match="has no examples"):
        xkfac.estimate(model, [*data, data[0][:0]], noise=0.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    anchors = [xkfac.consolidate(model, data, noise=noise).anchor for noise in (0.0, 0.5)]
    assert all(torch.equal(tensor, anchors[1][name]) for name, tensor in anchors[0].items())


def test_a_memory_keeps_its_noise_and_goes_on_with_it(tmp_path):
    model, data = net(), batches(2)
    xkfac.consolidate(model, data, "kfac", noise=0.5, draws=2).save(tmp_path / "memory.safetensors")
    memory = xkfac.Memory.load(tmp_path / "memory.safetensors")
    assert memory.method.settings.noise == 0.5


@pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf"), True, "much"])
def test_a_noise_that_is_none_is_refused(noise):
    with pytest.raises(xkfac.XkfacError, match=r"^noise is .*; it must be a finite number of at least 0$"):
        xkfac.Settings(noise=noise)
