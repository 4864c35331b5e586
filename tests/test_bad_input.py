"""What cannot be treated is refused in one sentence: labels, dtypes, models without values."""

import warnings

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.setups import data, mlp, target
from xkfac.model.recentre import recentre


def empirical(labels, likelihood="categorical", net=None, first=None, **options):
    """Estimate from true labels, those of a first batch being right."""
    net = net or mlp()
    batches = [(torch.randn(len(y), 6), y) for y in ([labels] if first is None else [first, labels])]
    return xkfac.estimate(net, batches, labels="empirical", likelihood=likelihood, **options)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 3, 1]), "the true label 3 is not one of the 3 classes 0 to 2 of the output; correct it"),
        (
            torch.tensor([0, -100, 1]),
            "the true label -100 is not one of the 3 classes 0 to 2 of the output; correct it",
        ),
        (torch.tensor([0.0, 1.0, 2.0]), "the true labels are torch.float32; the categorical likelihood takes classes"),
        (torch.tensor([True, False, True]), "the true labels are torch.bool; the categorical likelihood takes classes"),
        (torch.zeros(3, 1).long(), "labels have shape [3, 1]; for outputs [3, 3] the categorical likelihood takes [3]"),
    ],
)
def test_true_labels_that_are_no_classes_are_refused(labels, message, later):
    first = torch.tensor([0, 1, 2]) if later else None
    with pytest.raises(xkfac.XkfacError) as refused:
        empirical(labels, first=first)
    assert message in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_classes_may_be_of_any_integer_dtype(dtype):
    torch.manual_seed(0)
    expected = empirical(torch.tensor([0, 2, 1]))
    torch.manual_seed(0)
    found = empirical(torch.tensor([0, 2, 1], dtype=dtype))
    for (_, one), (_, other) in zip(found.curvature.tensors(), expected.curvature.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("likelihood", "labels", "message"),
    [
        (
            "bernoulli",
            torch.full((3, 1), 2.0),
            "the true label 2.0 is not between 0 and 1, as the bernoulli likelihood",
        ),
        ("bernoulli", torch.full((3, 1), float("nan")), "the true label nan is not between 0 and 1"),
        ("bernoulli", torch.ones(3), "labels have shape [3]; for outputs [3, 1] the bernoulli likelihood takes [3, 1]"),
        ("gaussian", torch.ones(3), "labels have shape [3]; for outputs [3, 1] the gaussian likelihood takes [3, 1]"),
    ],
)
def test_true_labels_of_one_column(likelihood, labels, message):
    net = nn.Linear(6, 1)
    with pytest.raises(xkfac.XkfacError) as refused:
        empirical(labels, likelihood, net)
    assert message in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_bernoulli_takes_zeros_and_ones_of_any_dtype(dtype):
    net, labels = nn.Linear(6, 1).double(), torch.tensor([[0], [1], [1]]).to(dtype)
    x = torch.randn(3, 6).double()
    made = xkfac.estimate(net, [(x, labels)], "diagonal", labels="empirical", likelihood="bernoulli")
    score = net(x).detach().sigmoid() - labels.double()
    expected = (score.T @ torch.cat([x, torch.ones(3, 1).double()], 1)).square() / 3
    (block,) = made.curvature.blocks.values()
    torch.testing.assert_close(block.values[0], expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.complex64, "float32"])
def test_a_curvature_is_accumulated_in_float32_or_float64(dtype):
    model = mlp()
    with pytest.raises(xkfac.XkfacError) as refused:
        xkfac.consolidate(model, data(), "xkfac", accumulation_dtype=dtype)
    assert str(refused.value) == (f"accumulation_dtype is {dtype}; it must be torch.float32 or torch.float64")
    for wide in (torch.float32, torch.float64):
        assert (
            xkfac.estimate(model, data(1), draws=1, accumulation_dtype=wide).curvature.blocks["6"].diagonal().dtype
            == wide
        )


@pytest.mark.parametrize(
    ("labels", "likelihood", "told"),
    [
        (torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), "categorical", True),  # several labels per example
        (torch.tensor([[0.4, -0.4, 1.0], [2.0, -1.0, 0.0]]), "categorical", True),  # numbers to predict
        (torch.tensor([[0.4, -0.4, 1.0], [2.0, -1.0, 0.0]]), "gaussian", False),
        (torch.tensor([[0.0, 1.0, 0.0], [0.3, 0.3, 0.4]]), "categorical", False),  # probabilities of classes
        (torch.tensor([0.5, 0.2]), "categorical", False),  # something else that a batch holds
    ],
)
def test_labels_that_are_no_classes_are_told(labels, likelihood, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        xkfac.consolidate(mlp(), [(torch.randn(2, 6), labels)] * 2, likelihood=likelihood, draws=1)
    said = [one for one in caught if "the labels are numbers, one per output" in str(one.message)]
    assert len(said) == told


def test_torchscript_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted = torch.jit.ScriptModule()

    with pytest.raises(
        xkfac.XkfacError, match="'scripted' is in TorchScript, whose passes cannot be followed; use the"
    ):
        xkfac.consolidate(Net(), data())


def test_a_memory_has_no_integers():
    with pytest.raises(
        xkfac.XkfacError, match=r"no numbers of dtype torch.int8; use torch.float32, float64 or bfloat16"
    ):
        xkfac.consolidate(mlp(), data(1), "xkfac", draws=1).to(dtype=torch.int8)


@pytest.mark.parametrize("call", ["consolidate", "recentre", "calibrate", "Learner"])
def test_a_model_without_values_is_refused(call):
    memory = xkfac.consolidate(mlp(), data(1), "xkfac", draws=1)
    with torch.device("meta"):
        model = mlp()
    work = {
        "consolidate": lambda: xkfac.consolidate(model, data(), "xkfac"),
        "recentre": lambda: recentre(model, target()),
        "calibrate": lambda: xkfac.calibrate(model, memory, data()),
        "Learner": lambda: xkfac.Learner(model, memory),
    }[call]
    with pytest.raises(xkfac.XkfacError) as refused:
        work()
    assert str(refused.value) == (
        "'0.weight' is on the meta device and has no values; give the model memory by model.to_empty(device='cpu') and "
        "load its weights before a pass over data"
    )
    assert len(xkfac.find_units(model, data()[0]).units) == 3  # for which no values are needed
