"""Loaders, batches, precisions and options of the estimator, and the messages for what it cannot do."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import xkfac


def net(features=4, classes=3):
    return nn.Sequential(
        nn.Linear(features, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, classes, bias=False)
    )


def same(a, b, **tolerance):
    for (unit, x), (other, y) in zip(a.curvature.tensors(), b.curvature.tensors(), strict=True):
        assert unit == other
        torch.testing.assert_close(x, y, **tolerance)


def differs(a, b):
    return any(
        not torch.equal(x, y) for (_, x), (_, y) in zip(a.curvature.tensors(), b.curvature.tensors(), strict=True)
    )


def test_batches_of_any_kind_give_the_same_factors():
    model, x, y = net(), torch.randn(8, 4), torch.randint(3, (8,))
    reference = xkfac.estimate(model, [(x, y)], draws=1)
    for loader in (
        [x],
        [{"input": x, "label": y}],
        [([x], {"class": y})],
        iter([(x, y)]),
        DataLoader(TensorDataset(x, y), 8),
    ):
        same(xkfac.estimate(model, loader, draws=1), reference)
    deep = [{"image": {"deep": x}}]
    same(xkfac.estimate(model, deep, draws=1, forward=lambda m, b: m(b["image"]["deep"])), reference)


@pytest.mark.parametrize(("batches", "draws"), [(1, 32), (16, 32), (100, 6), (512, 1), (2000, 1)])
def test_few_batches_get_several_draws(batches, draws):
    assert xkfac.Settings().draws_over(batches) == draws
    assert xkfac.Settings(draws=3).draws_over(batches) == 3


def test_draws_left_open_make_up_for_few_batches():
    model, x = net(), torch.randn(8, 4)
    same(xkfac.estimate(model, [x]), xkfac.estimate(model, [x], draws=32), rtol=0, atol=0)
    same(xkfac.estimate(model, iter([x])), xkfac.estimate(model, [x], draws=32), rtol=0, atol=0)
    many = xkfac.estimate(model, [x] * 100, max_batches=2)
    same(many, xkfac.estimate(model, [x] * 2, draws=32), rtol=0, atol=0)
    _, coarse = xkfac.estimate(model, [x], draws=1, form="paper").curvature.blocks["0"].terms
    assert torch.linalg.matrix_rank(coarse.right[0]) == 1


def test_a_stream_without_length():
    class Stream(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                yield torch.randn(4, generator=generator), 0

    estimate = xkfac.estimate(net(), DataLoader(Stream(), 6), max_batches=3)
    assert estimate.examples == 18


def test_labels_are_drawn_by_the_seed_alone():
    model, x = net(), torch.randn(8, 4)
    first = xkfac.estimate(model, [x], seed=1)
    torch.manual_seed(123)
    same(xkfac.estimate(model, [x], seed=1), first, rtol=0, atol=0)
    assert differs(xkfac.estimate(model, [x], seed=2), first)


def test_a_last_batch_of_one_example_runs_with_population_statistics():
    model, x = net().double(), torch.randn(5, 4).double()
    estimate = xkfac.estimate(model, [x[:4], x[4:]], labels="exact", kind="kfac")
    assert estimate.examples == 5
    four = xkfac.estimate(model, [x[:4]], labels="exact", kind="kfac").curvature.blocks["3"].terms[0]
    one = xkfac.estimate(model, [x[4:]], labels="exact", kind="kfac", statistics="population")
    one = one.curvature.blocks["3"].terms[0]
    both = estimate.curvature.blocks["3"].terms[0]
    torch.testing.assert_close(both.left, 0.8 * four.left + 0.2 * one.left)
    torch.testing.assert_close(both.right, 0.8 * four.right + 0.2 * one.right)


def test_population_statistics_are_those_of_evaluation_mode():
    model, x = net().double(), torch.randn(6, 4).double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    estimate = xkfac.estimate(model, [x], labels="exact", kind="kfac", statistics="population")
    features = model.eval()[:3](x).detach()
    torch.testing.assert_close(estimate.curvature.blocks["3"].terms[0].left[0], features.T @ features / 6)


def test_dropout_is_off_in_a_curvature_pass():
    x = torch.randn(8, 4)
    plain = net()
    dropping = nn.Sequential(plain[0], plain[1], nn.Sequential(plain[2], nn.Dropout(0.9)), plain[3])
    ours, theirs = xkfac.estimate(dropping.train(), [x]), xkfac.estimate(plain, [x])
    same(ours, theirs)


def test_empirical_fisher_uses_the_true_labels():
    model, x, y = net().double(), torch.randn(6, 4).double(), torch.randint(3, (6,))
    empirical = xkfac.estimate(model, [(x, y)], "diagonal", labels="empirical").curvature.blocks["3"].values
    features = model.train()[:3](x).detach()
    score = model[3](features).softmax(1) - nn.functional.one_hot(y, 3)
    torch.testing.assert_close(empirical[0], (score.T @ features).square() / 6)


def test_several_draws_are_their_mean():
    model, x = net().double(), torch.randn(6, 4).double()
    many = xkfac.estimate(model, [x], "diagonal", draws=3).curvature.blocks["0"].values
    assert not torch.equal(many, xkfac.estimate(model, [x], "diagonal").curvature.blocks["0"].values)
    labels = iter(torch.tensor([[0] * 6, [1] * 6, [2] * 6]))

    class Fixed(xkfac.Categorical):
        def sample(self, output, generator):
            return next(labels)

    options = {"labels": "sampled", "draws": 3, "likelihood": Fixed()}
    fixed = xkfac.estimate(model, [x], "diagonal", **options).curvature.blocks["0"].values
    single = [
        xkfac.estimate(model, [(x, torch.full((6,), c))], "diagonal", labels="empirical").curvature.blocks["0"].values
        for c in range(3)
    ]
    torch.testing.assert_close(fixed, sum(single) / 3)


@pytest.mark.parametrize("method", ["xkfac", "corrected"])
def test_a_memory_is_extended_in_full_precision_under_autocast(method):
    model, data = net(), [torch.randn(8, 4), torch.randn(8, 4)]
    memory = xkfac.consolidate(model, data, method)
    new = xkfac.estimate(model, data[:1], method)
    plain = memory.extend(model, new, weights=(0.5, 0.5))
    with torch.autocast("cpu", torch.bfloat16):
        reduced = memory.extend(model, new, weights=(0.5, 0.5))
    for (_, a), (_, b) in zip(plain.curvature.tensors(), reduced.curvature.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_autocast_accumulates_in_the_wide_type(dtype):
    model, x = net(32, 10), torch.randn(64, 32)
    full = xkfac.estimate(model, [x], labels="exact", form="paper", accumulation_dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        reduced = xkfac.estimate(model, [x], labels="exact", form="paper", accumulation_dtype=dtype)
    for (_, a), (_, b) in zip(full.curvature.tensors(), reduced.curvature.tensors(), strict=True):
        assert b.dtype == dtype
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-8
    first = reduced.curvature.blocks["0"].terms[1].left[0, :-1, -1]
    torch.testing.assert_close(first, x.mean(0).to(dtype), rtol=1e-4, atol=1e-6)


def test_accumulates_in_float64_for_a_float64_model():
    assert {t.dtype for _, t in xkfac.estimate(net().double(), [torch.randn(4, 4).double()]).curvature.tensors()} == {
        torch.float64
    }
    assert {t.dtype for _, t in xkfac.estimate(net(), [torch.randn(4, 4)]).curvature.tensors()} == {torch.float32}


def test_frozen_parameters_are_covered_too():
    model, x = net(), torch.randn(8, 4)
    reference = xkfac.estimate(model, [x])
    same(xkfac.estimate(model.requires_grad_(False), [x]), reference)


def test_a_unit_without_influence_has_no_curvature():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            self.spare(x)
            return self.used(x)

    curvature = xkfac.estimate(Spare(), [torch.randn(4, 3)]).curvature
    assert curvature.blocks["spare"].diagonal().abs().max() == 0
    assert curvature.blocks["used"].diagonal().abs().max() > 0


def test_gradient_checkpointing_inside_the_model():
    class Checkpointed(nn.Module):
        def __init__(self, inner, reentrant):
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x):
            part = torch.utils.checkpoint.checkpoint(self.inner[:3], x, use_reentrant=self.reentrant)
            return self.inner[3](part)

    model, x = net(), torch.randn(8, 4)
    ours = xkfac.estimate(Checkpointed(model, False), [x])
    theirs = xkfac.estimate(model, [x])
    for name in ("0", "3"):
        for a, b in zip(ours.curvature.blocks[f"inner.{name}"].terms, theirs.curvature.blocks[name].terms, strict=True):
            torch.testing.assert_close(a.left, b.left)
            torch.testing.assert_close(a.right, b.right)
    with pytest.raises(xkfac.UnitError, match=r"unit 'inner.0' ran with gradients disabled.*use_reentrant=False"):
        xkfac.estimate(Checkpointed(model, True), [x])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "xkfacc"},
            r"kind is 'xkfacc' \(did you mean 'xkfac'\?\); it must be one of xkfac, kfac, diagonal, corrected",
        ),
        ({"form": "means"}, r"form is 'means' \(did you mean 'mean'\?\); it must be one of paper, mean"),
        ({"grouping": "all"}, "grouping is 'all'; it must be one of paper, pooled, hierarchical"),
        ({"labels": "true"}, "labels is 'true'; it must be one of signs, sampled, exact, empirical"),
        ({"statistics": "running"}, "statistics is 'running'; it must be one of batch, population"),
        ({"draws": 0}, "draws must be at least 1, not 0"),
        ({"draws": 2, "labels": "exact"}, "draws=2 goes with labels='signs' or 'sampled', not 'exact'"),
        ({"kind": "diagonal", "cross_layer": True}, "cross_layer goes with kind 'xkfac' or 'kfac', not 'diagonal'"),
        ({"max_batches": 0}, "max_batches must be at least 1, not 0"),
        ({"labels": "empirical"}, "labels='empirical' needs the true labels"),
        ({"forward": lambda m, b: m(b).sum()}, "must be a tensor with 8 rows, one per example, but is \\[\\]"),
        ({"forward": lambda m, b: m(b).detach()}, "depends on none of its parameters"),
    ],
)
def test_bad_options_have_one_clear_sentence(options, message):
    with pytest.raises(xkfac.XkfacError, match=message):
        xkfac.estimate(net(), [torch.randn(8, 4)], **options)


def test_bad_data_has_one_clear_sentence():
    model = net()
    with pytest.raises(xkfac.XkfacError, match="the loader gave no batch"):
        xkfac.estimate(model, [])
    with pytest.raises(xkfac.XkfacError, match="the factors of unit '0' are not finite"):
        xkfac.estimate(model, [torch.full((8, 4), float("nan"))])
    with pytest.raises(xkfac.XkfacError, match="the loader gave no batch"):
        xkfac.estimate(model, iter([torch.randn(8, 4)]), kind="corrected")
    with pytest.raises(xkfac.XkfacError, match="needs a tensor of 8 labels"):
        xkfac.estimate(model, [(torch.randn(8, 4), torch.zeros(7))], labels="empirical")


def test_a_network_that_changes_its_path_is_refused():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.always(x) if x.shape[0] == 2 else self.sometimes(self.always(x))

    with pytest.raises(xkfac.UnitError, match="unit 'sometimes' ran 0 times on this batch but 1 on the first"):
        xkfac.estimate(Fickle(), [torch.randn(4, 3), torch.randn(2, 3)])


def test_cross_layer_blocks_refuse_layers_of_several_positions():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(xkfac.UnitError, match="of one position per example, and unit '0' has 4, '1' has 4; exclude"):
        xkfac.estimate(net, [torch.randn(2, 4, 3)], cross_layer=True)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("kind", ["xkfac", "diagonal", "corrected"])
def test_cuda_agrees_with_the_cpu(kind):
    model, x = net().double(), torch.randn(16, 4).double()
    cpu = xkfac.estimate(model, [x], kind, labels="exact")
    gpu = xkfac.estimate(model.cuda(), [x], kind, labels="exact")
    for name, block in cpu.curvature.blocks.items():
        torch.testing.assert_close(gpu.curvature.blocks[name].dense().cpu(), block.dense())


@cuda
def test_cuda_random_state_is_left_alone():
    model = net().cuda()
    before = torch.cuda.get_rng_state()
    xkfac.estimate(model, [torch.randn(16, 4)])
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_bn_that_splits_its_batch_is_refused():
    class Ghost(nn.BatchNorm1d):
        def forward(self, x):
            parent = super().forward
            return torch.cat([parent(chunk) for chunk in x.chunk(2)]) if self.training else parent(x)

    model = nn.Sequential(nn.Linear(4, 4), Ghost(4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(xkfac.UnitError, match="unit '0' gave 4 rows for a batch of 8 examples; a BN that splits"):
        xkfac.estimate(model, [torch.randn(8, 4)])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "kfac", "form": "paper"},
        {"kind": "diagonal", "grouping": "pooled"},
        {"kind": "corrected", "grouping": "pooled"},
    ],
)
def test_options_without_effect_are_refused(options):
    with pytest.raises(xkfac.XkfacError, match="has no effect on kind"):
        xkfac.estimate(net(), [torch.randn(8, 4)], **options)
