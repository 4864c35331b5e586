"""Re-centring (the preprocessing): same function, same W~, statistics of the new data, in one pass."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.setups import randomise
from xkfac import to_renorm
from xkfac.errors import UnitError, XkfacError
from xkfac.model.merged_weight import anchor_of
from xkfac.model.passes import norms_of
from xkfac.model.recentre import recentre
from xkfac.model.units import find_units


class Nested(nn.Module):
    """BN behind BN behind BN, with a residual connection and a BN of features."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.ReLU())
        self.features = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-3), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.block(x)
        return self.head(self.features(x.mean((2, 3))))


def loader(dtype=torch.float32):
    """Return batches of unequal sizes and unequal statistics."""
    return [
        (torch.randn(size, 2, 5, 5, dtype=dtype) * (1 + i) + i, torch.zeros(size, dtype=torch.long))
        for i, size in enumerate((7, 3, 12, 1))
    ]


def state(net):
    """Return all that a failed or finished pass could have changed, as comparable values."""
    tensors = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flags = [(m.training, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in net.modules()]
    return tensors, flags, [p.requires_grad for p in net.parameters()], torch.get_rng_state()


def assert_same(before, after):
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name


def norm_inputs(net, batches):
    """Return the inputs of every BN over the concatenated data, in evaluation mode."""
    net = copy.deepcopy(net).eval()
    seen = {}
    for path, norm in norms_of(net).items():
        norm.register_forward_pre_hook(lambda module, inputs, path=path: seen.update({path: inputs[0]}))
    with torch.no_grad():
        net(torch.cat([x for x, _ in batches]))
    return seen


@pytest.mark.parametrize("renorm", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_function_and_merged_weights_stay_and_statistics_are_the_pooled_ones(dtype, tolerance, renorm):
    net = randomise(Nested()).to(dtype)
    net = to_renorm(net) if renorm else net
    batches = loader(dtype)
    x = torch.randn(9, 2, 5, 5, dtype=dtype)
    units = find_units(net, x).units
    net.eval()
    output, anchor, inputs = net(x).detach(), anchor_of(net, units), norm_inputs(net, batches)
    old = {path: (norm.weight.clone(), norm.bias.clone()) for path, norm in norms_of(net).items()}
    recentre(net.train(), batches)
    assert all(module.training for module in net.modules())
    after = net.eval()(x).detach()
    assert (after - output).norm() <= tolerance * output.norm()
    for name, weight in anchor_of(net, units).items():
        assert (weight - anchor[name]).norm() <= tolerance * anchor[name].norm(), name
    assert len(inputs) == 4
    for path, norm in norms_of(net).items():
        values = inputs[path].double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(norm.running_mean.double(), values.mean(1), rtol=tolerance, atol=tolerance)
        var = values.var(1, correction=0)
        torch.testing.assert_close(norm.running_var.double(), var, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(norm.weight, old[path][0], rtol=1e-2)
        assert not torch.allclose(norm.bias, old[path][1], rtol=1e-2)


def test_gamma_and_beta_are_those_of_the_equation():
    net = randomise(nn.Sequential(nn.BatchNorm1d(3))).double()
    norm = net[0]
    x = torch.randn(20, 3, dtype=torch.float64) * 3 + 1
    gamma, beta = norm.weight.clone(), norm.bias.clone()
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    recentre(net, [x[:13], x[13:]])
    for i in range(3):
        mu, sigma2 = x[:, i].mean(), x[:, i].var(correction=0)
        new_beta = beta[i] + gamma[i] / torch.sqrt(var[i] + norm.eps) * (mu - mean[i])
        new_gamma = torch.sqrt((sigma2 + norm.eps) / (var[i] + norm.eps)) * gamma[i]
        torch.testing.assert_close(norm.bias[i], new_beta)
        torch.testing.assert_close(norm.weight[i], new_gamma)


def test_one_pass_over_the_loader_in_evaluation_mode():
    class Counting:
        passes = batches = 0

        def __iter__(self):
            self.passes += 1
            for batch in loader():
                self.batches += 1
                yield batch

    net, counting, modes = randomise(Nested()), Counting(), []
    net.register_forward_pre_hook(lambda module, inputs: modes.append({m.training for m in module.modules()}))
    recentre(net, counting)
    assert (counting.passes, counting.batches) == (1, 4)
    assert modes == [{False}] * 4
    recentre(net, counting, max_batches=2)
    assert (counting.passes, counting.batches) == (2, 6)


def test_a_generator_and_a_forward_of_the_users_own():
    net = randomise(Nested())
    twin = copy.deepcopy(net)
    batches = loader()
    recentre(net, batches)
    recentre(twin, ({"image": x} for x, _ in batches), forward=lambda model, batch: model(batch["image"]))
    assert_same(state(net), state(twin))


def test_counters_flags_and_hooks_stay():
    net = randomise(Nested())
    net.block.eval()
    net.head.weight.requires_grad_(False)
    net.stem[0].weight.requires_grad_(False)
    batches = loader()
    before = state(net)
    recentre(net, batches)
    after = state(net)
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])
    assert torch.equal(before[0]["stem.0.num_batches_tracked"], after[0]["stem.0.num_batches_tracked"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda net, batches: net.features.__setitem__(1, nn.BatchNorm1d(6, affine=False)),
            "'features.1' has no gamma",
        ),
        (lambda net, batches: net.features[1].register_parameter("bias", None), "'features.1' has no gamma and beta"),
        (lambda net, batches: batches[1][0].fill_(float("nan")), "'stem.0' is not finite"),
        (lambda net, batches: batches[2][0][0, 0, 0, 0].fill_(1e30), "'stem.0' is not finite"),
        (lambda net, batches: batches.clear(), "no batch"),
        (lambda net, batches: batches.append((torch.zeros(0, 2, 5, 5), torch.zeros(0))), "batch 4 .* no examples"),
        (lambda net, batches: batches.append((torch.zeros(2, 3, 5, 5), torch.zeros(2))), "must match the size"),
    ],
)
def test_an_error_leaves_the_model_unchanged(spoil, words):
    net, batches = randomise(Nested()).train(), loader()
    spoil(net, batches)
    before = state(net)
    with pytest.raises((XkfacError, RuntimeError), match=words):
        recentre(net, batches)
    assert_same(before, state(net))


def test_the_error_of_a_bn_without_affine_names_the_remedy():
    with pytest.raises(UnitError, match="affine=True, or begin with recentre=False"):
        recentre(nn.Sequential(nn.BatchNorm1d(3, affine=False)), [torch.randn(4, 3)])


def test_bn_that_new_data_does_not_pass_or_that_keeps_no_statistics_stays():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)
            self.batch_only = nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x):
            return self.batch_only(self.used(input=x))

    net, x = Partial(), torch.randn(8, 3) + 4
    before = state(net)[0]
    recentre(net, [x])
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name]) == (not name.startswith("used") or name.endswith("tracked")), name
    torch.testing.assert_close(net.used.running_mean, x.mean(0))


def test_a_channel_without_variance():
    net = randomise(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))).double().eval()
    x = torch.randn(6, 2, dtype=torch.float64)
    x[:, 1] = 3.0
    other = torch.randn(5, 2, dtype=torch.float64)
    output = net(other)
    recentre(net, [x])
    assert net[0].running_var[1] < 1e-20
    torch.testing.assert_close(net(other), output, rtol=1e-10, atol=1e-10)
