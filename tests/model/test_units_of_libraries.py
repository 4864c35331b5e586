"""Real networks: the numbers of their units, and that W~ on the unrolled input is what each unit computes."""

import warnings
from collections import Counter

import pytest
import timm
import torch
import torchvision
from torch import nn

import xkfac
from tests.helpers.unit_checks import assert_partition, assert_replays, randomise_norms
from xkfac.curvature.blocks import parts
from xkfac.model.passes import norms_of

# (merged convolutions, convolutions alone, BN alone, linear, free), counted by hand from the architectures.
NETS = {
    "torchvision/resnet18": (20, 0, 0, 1, 0),
    "torchvision/resnet50": (53, 0, 0, 1, 0),
    "torchvision/wide_resnet50_2": (53, 0, 0, 1, 0),
    # A stem; 58 layers of norm, conv + norm, conv; 3 transitions of norm, conv; a last norm.
    "torchvision/densenet121": (1 + 58, 58 + 3, 58 + 3 + 1, 1, 0),
    "torchvision/mobilenet_v2": (52, 0, 0, 1, 0),
    # 16 blocks, each with a squeeze-and-excitation of two convolutions with bias.
    "torchvision/efficientnet_b0": (49, 32, 0, 1, 0),
    "torchvision/vgg16_bn": (13, 0, 0, 3, 0),
    # Two auxiliary heads of 7 parameters each do not run in evaluation mode.
    "torchvision/googlenet": (57, 0, 0, 1, 2 * 7),
    # A stem of 3, 8 blocks of 3, 4 convolutions at the skips.
    "timm/resnet26d": (3 + 8 * 3 + 4, 0, 0, 1, 0),
    "timm/efficientnet_lite0": (49, 0, 0, 1, 0),
    # A stem, 13 blocks of 3, 4 convolutions at the skips.
    "timm/regnetx_002": (1 + 13 * 3 + 4, 0, 0, 1, 0),
    "timm/mobilenetv3_small_050": (34, 2 * 9 + 1, 0, 1, 0),
    # 16 pre-activated blocks of norm, conv + norm, conv + norm, conv; stem, 4 skips, a head that is a convolution.
    "timm/resnetv2_50": (16 * 2, 16 + 1 + 4 + 1, 16 + 1, 0, 0),
    # 12 blocks of 3 convolutions, a stem, 3 downsamplings; 17 layer norms and 12 scales are free.
    "timm/convnext_atto": (0, 12 * 3 + 1 + 3, 0, 1, 17 * 2 + 12),
}


def make(name):
    library, name = name.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet and inception complain about a default of their own
        if library == "timm":
            return timm.create_model(name, drop_path_rate=0.1)
        extra = {"init_weights": False} if name == "googlenet" else {}
        return torchvision.models.get_model(name, **extra)


def norms_behind(model, x):
    """Return {layer: BN} for all layers whose output, the very tensor, is the input of a BN, as module hooks see it."""
    made, pairs, handles = [], {}, []
    paths = {module: path for path, module in model.named_modules()}

    def enter(norm, inputs):
        pairs.update({paths[layer]: paths[norm] for layer, output in made if output is inputs[0]})

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            handles.append(module.register_forward_hook(lambda layer, inputs, output: made.append((layer, output))))
    handles += [norm.register_forward_pre_hook(enter) for norm in norms_of(model).values()]
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return pairs


@pytest.mark.parametrize("name", NETS)
def test_units_of_a_known_network(name):
    with torch.device("meta"):
        model, x = make(name), torch.randn(2, 3, 64, 64)
    coverage = xkfac.find_units(model, x)
    assert_partition(model, coverage)
    kinds = Counter((unit.kind, unit.norm is not None) for unit in coverage.units)
    keys = [("conv", True), ("conv", False), ("norm", True), ("linear", False), ("free", False)]
    assert dict(kinds) == {key: number for key, number in zip(keys, NETS[name], strict=True) if number}
    merged = {unit.name: unit.norm for unit in coverage.units if unit.kind != "norm" and unit.norm is not None}
    assert merged == norms_behind(model, x)


def test_parts_that_do_not_run_are_said_to_be_unseen():
    with torch.device("meta"):
        model, x = make("torchvision/googlenet"), torch.randn(2, 3, 64, 64)
    unseen = {row.parameter for row in xkfac.find_units(model, x).rows if row.note == "not seen in the forward pass"}
    assert unseen == {name for name, _ in model.named_parameters() if name.startswith(("aux1.", "aux2."))}


@pytest.mark.parametrize(
    "name",
    [
        "torchvision/resnet18",
        "torchvision/densenet121",
        "torchvision/mobilenet_v2",
        "torchvision/efficientnet_b0",
        "timm/mobilenetv3_small_050",
        "timm/regnetx_002",
        "timm/resnetv2_50",
    ],
)
def test_merged_weights_replay_a_known_network(name):
    """Proves units, unrolling and merging at once."""
    model = randomise_norms(make(name)).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert_replays(model, x, xkfac.find_units(model, x).units)


def test_in_place_activations_do_not_change_a_factor():
    model = torchvision.models.resnet18(num_classes=10)
    assert any(getattr(module, "inplace", False) for module in model.modules())
    batches = [torch.randn(4, 3, 32, 32)]
    options = {"max_batches": 1, "exclude": "layer4"}  # its factors are the largest and tell nothing new
    in_place = xkfac.estimate(model, batches, **options)
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    plain = xkfac.estimate(model, batches, **options)
    assert in_place.coverage == plain.coverage
    for unit, block in in_place.curvature.blocks.items():
        others = parts(plain.curvature.blocks[unit])
        assert len(others) >= 2
        for factor, tensor in parts(block).items():
            assert torch.equal(tensor, others[factor]), (unit, factor)
            assert tensor.abs().max() > 0


def test_all_norms_that_are_refused_are_named_with_what_excludes_them():
    with torch.device("meta"):
        model, x = timm.create_model("levit_128s"), torch.randn(2, 3, 224, 224)
    refused = [path for path in norms_of(model) if path.startswith("stages.")]
    assert len(refused) == 46
    with pytest.raises(xkfac.UnitError) as caught:
        xkfac.find_units(model, x)
    first, *others = refused
    assert str(caught.value) == (
        f"'{first}' normalises 392 rows for a batch of 2 examples; keep the batch as its first dimension; or add "
        f"['stages.*.bn'] to exclude, which leaves out all 46 BN layers that are refused: '{first}', "
        + ", ".join(map(repr, others))
    )
    coverage = xkfac.find_units(model, x, exclude=["stages.*.bn"])
    left_out = {row.parameter for row in coverage.rows if row.kind == "excluded"}
    assert left_out == {f"{path}.{name}" for path in refused for name in ("weight", "bias")}
