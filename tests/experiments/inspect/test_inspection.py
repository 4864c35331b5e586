"""What a memory file holds, in numbers that a person can judge, against matrices that are written out."""

import json
import math
from dataclasses import replace

import pytest
import torch

import xkfac
from tests.helpers import memories
from tests.helpers import small_runs as small
from xkfac import Memory, MemoryFileError, Settings, XkfacError
from xkfac.calibration import Calibration, CurvePoint
from xkfac.curvature.blocks import Corrected, Diagonal, Kronecker, Term, eigenbasis
from xkfac.experiments.inspect import entries, inspection, spectra
from xkfac.experiments.inspect.entries import MeanEntry, approximations, derivable, mean_absolute
from xkfac.experiments.inspect.inspection import calibration_table, facts, inspect_memory, unit_table
from xkfac.experiments.inspect.spectra import Spectrum, effective_rank, largest_eigenvalue

WIDE = torch.float64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = small.recipe('lines.all={ keep = "all" }').only(["xkfac", "kfac", "ewc", "corrected", "all"])
    return small.finish(small.make(tmp_path_factory.mktemp("runs") / "run", recipe))


def memory_of(run, name):
    return run.job(name, 0).path / "memory-2.safetensors"


def positive(groups, size, rank=None, seed=0):
    """Positive semi-definite matrices with eigenvalues over some decades."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(groups, rank or size, size, generator=generator, dtype=WIDE)
    return root.mT @ (root * torch.logspace(0, -3, rank or size, dtype=WIDE)[:, None])


def root(groups, rank, size, seed=0):
    return torch.randn(groups, rank, size, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def blocks(groups=2, rows=4, columns=9):
    """One block of every kind, the last two sums of products with signed entries."""
    full = Term(positive(groups, columns), positive(groups, rows, seed=1))
    thin = Term(root(groups, 2, columns), positive(groups, rows, 2, seed=2), low_rank=True)
    other = Term(positive(groups, columns, seed=3), positive(groups, rows, seed=4))
    return {
        "full": Kronecker((full,)),
        "thin": Kronecker((thin,)),
        "diagonal": Diagonal(root(groups, rows, columns).abs()),
        "corrected": Corrected(
            **{
                **vars(eigenbasis(full.left, full.right)),
                "scales": root(groups, rows, columns, 4).square(),
            }
        ),
        "two": Kronecker((full, thin)),
        "three": Kronecker((full, other, thin)),
    }


def dense_eigenvalues(block):
    return torch.linalg.eigvalsh(block.dense()).flatten().clamp(min=0).sort(descending=True).values


# ---------------------------------------------------------------- spectra


@pytest.mark.parametrize("kind", ["full", "thin", "diagonal", "corrected"])
def test_spectra_of_blocks_that_are_no_sums_are_those_of_the_dense_matrices(kind):
    block = blocks()[kind]
    values = dense_eigenvalues(block)
    (found,) = spectra.spectra(block)
    assert found.size == len(values) == 2 * 4 * 9
    assert found.trace == pytest.approx(float(values.sum()))
    assert found.largest == pytest.approx(float(values[0]))
    assert largest_eigenvalue(block) == (found.largest, 0)
    assert found.effective_rank == pytest.approx(float(values.sum() ** 2 / values.square().sum()))
    assert float(values[: found.ninety].sum()) >= 0.9 * found.trace * (1 - 1e-9)
    assert float(values[: found.ninety - 1].sum()) < 0.9 * found.trace
    for decade, count in enumerate(found.decades):
        share = values / values[0]
        assert count == int(((share <= 10.0**-decade) & (share > 10.0 ** -(decade + 1))).sum()), decade
    assert sum(found.decades) + found.below == found.size


@pytest.mark.parametrize("kind", list(blocks()))
def test_the_effective_rank_and_trace_of_every_block_are_exact(kind):
    block = blocks()[kind]
    values = dense_eigenvalues(block)
    assert effective_rank(block) == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-9)
    assert spectra.trace(block) == pytest.approx(float(values.sum()), rel=1e-9)


@pytest.mark.parametrize("kind", ["two", "three"])
def test_a_sum_has_the_exact_spectrum_of_each_term_and_the_largest_eigenvalue_of_all(kind, monkeypatch):
    block = blocks()[kind]
    top = float(dense_eigenvalues(block)[0])
    for term, found in zip(block.terms, spectra.spectra(block), strict=True):
        alone = dense_eigenvalues(Kronecker((term,)))
        assert found.largest == pytest.approx(float(alone[0]))
        assert found.trace == pytest.approx(float(alone.sum()))
        assert found.largest < top * (1 - 1e-3)  # the largest of a term is not that of the sum
    assert largest_eigenvalue(block) == (pytest.approx(top, rel=1e-9), 0)
    monkeypatch.setattr(spectra, "_DENSE", 0)
    for seed in range(3):
        value, distance = largest_eigenvalue(block, seed)
        assert value == pytest.approx(top, rel=1e-6)
        assert abs(value - top) <= distance + 1e-12 * top
        assert distance <= 1e-3 * top


def test_lanczos_in_single_precision():
    left, thin = positive(1, 60), root(1, 3, 60, 5)
    block = Kronecker((Term(left, positive(1, 20, seed=1)), Term(thin, positive(1, 20, 2, seed=2), low_rank=True)))
    top = float(dense_eigenvalues(block)[0])
    rounded = Kronecker(tuple(Term(t.left.float(), t.right.float(), t.low_rank) for t in block.terms))
    assert spectra._DENSE < 60 * 20
    assert largest_eigenvalue(rounded)[0] == pytest.approx(top, rel=1e-5)


def test_lanczos_of_equal_eigenvalues_and_of_none(monkeypatch):
    monkeypatch.setattr(spectra, "_DENSE", 0)
    same = Term(torch.eye(3, dtype=WIDE)[None], torch.eye(2, dtype=WIDE)[None])
    assert largest_eigenvalue(Kronecker((same, same))) == pytest.approx((2, 0))
    nothing = Term(torch.zeros(1, 3, 3), torch.zeros(1, 2, 2))
    assert largest_eigenvalue(Kronecker((nothing, nothing))) == (0, 0)
    assert effective_rank(Kronecker((nothing, nothing))) == 0


def test_a_spectrum_by_hand():
    found = Spectrum.of(torch.tensor([[8.0, 1.0], [0.9, 0.02], [0.0, -1e-9]]))
    assert (found.size, found.trace, found.largest) == (6, pytest.approx(9.92), 8)
    assert found.effective_rank == pytest.approx(9.92**2 / (64 + 1 + 0.81 + 0.0004))
    assert found.ninety == 2  # 8 is 81%, 9 is 91%
    assert (found.decades, found.below) == ((3, 0, 1, 0, 0, 0), 2)
    # ln 4 / ln 7 of eight bars, then ln 2 / ln 7
    assert found.sparkline == "▆ ▃   "
    assert Spectrum.of(torch.zeros(4)) == Spectrum(4, 0, 0, 0, 0, (0,) * 6, 4)
    assert Spectrum.of(torch.ones(5)).decades[0] == 5


# ---------------------------------------------------------------- mean absolute entries


def signed_terms(groups=2):
    """Sums whose entries cancel in part, unevenly between groups."""
    weights = torch.tensor([1.0, 1e-3], dtype=WIDE)[:groups, None, None]
    full = Term(root(groups, 9, 9) * weights, root(groups, 4, 4, 1))
    other = Term(-root(groups, 9, 9, 2), root(groups, 4, 4, 3) * weights)
    return full, other, Term(root(groups, 2, 9, 4), root(groups, 4, 4, 5), low_rank=True)


def dense_mean(terms):
    return float(Kronecker(tuple(terms)).dense().abs().mean())


def draw(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", [2, 3])
def test_the_sampled_mean_is_unbiased_and_its_error_bar_is_right(count, monkeypatch):
    terms = signed_terms()[:count]
    true = dense_mean(terms)
    assert mean_absolute(terms, draw(0)) == MeanEntry(pytest.approx(true), 0, 2 * 36**2)
    monkeypatch.setattr(entries, "_SMALL", 0)
    found = [mean_absolute(terms, draw(seed), draws=500) for seed in range(300)]
    errors = [(each.mean - true) / each.error for each in found]
    assert abs(sum(errors) / 300) < 4 / math.sqrt(300)
    assert torch.tensor(errors).std() == pytest.approx(1, abs=0.17)  # four standard errors of a deviation
    assert 0.9 < sum(abs(error) < 2 for error in errors) / 300 < 0.99
    large = mean_absolute(terms, draw(0), draws=200_000)
    assert large.mean == pytest.approx(true, rel=0.01)
    assert abs(large.mean - true) < 4 * large.error
    assert large.error < 0.005 * true


def test_the_mean_of_one_product_is_exact_however_large(monkeypatch):
    monkeypatch.setattr(entries, "_SMALL", 0)
    for term in signed_terms():
        found = mean_absolute([term], draw(0), draws=1)
        assert found == MeanEntry(pytest.approx(dense_mean([term])), 0, 2 * 36**2)


def test_entries_that_cancel_exactly_and_entries_of_one_sign(monkeypatch):
    monkeypatch.setattr(entries, "_SMALL", 0)
    term = signed_terms()[0]
    assert mean_absolute([term, Term(-term.left, term.right)], draw(0), draws=100).mean == 0
    twice = mean_absolute([term, term], draw(0), draws=100)
    assert twice.mean == pytest.approx(2 * dense_mean([term]))
    assert twice.error == pytest.approx(0, abs=1e-12)
    zero = Term(torch.zeros(2, 9, 9), torch.zeros(2, 4, 4))
    assert mean_absolute([zero, zero], draw(0), draws=100) == MeanEntry(0, 0, 2 * 36**2)


def test_means_over_blocks_count_every_entry_once():
    found = entries.over_blocks([MeanEntry(1.0, 0.3, 10), MeanEntry(4.0, 0.4, 30)])
    assert found == MeanEntry(pytest.approx(3.25), pytest.approx(math.hypot(3, 12) / 40), 40)
    assert entries.over_blocks([]) is None


VARIANTS = {
    "mean": {},
    "mean-pooled": {"grouping": "pooled"},
    "mean-hierarchical": {"grouping": "hierarchical"},
    "paper": {"form": "paper"},
}


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_kfac_from_the_factors_of_xkfac_is_kfac(kind, variant):
    net, data, _ = memories.make(kind, dtype=WIDE)
    options = {"labels": "exact", "accumulation_dtype": WIDE}
    changes = {"xkfac": VARIANTS[variant], "kfac": {}}
    made = [xkfac.consolidate(net, data, method, **options, **changes[method]) for method in changes]
    batch = 8 if variant == "paper" else None
    settings = made[0].method.settings
    assert derivable(settings, batch) == ""
    units = [name for name, block in made[1].curvature.blocks.items() if isinstance(block, Kronecker)]
    assert len(units) >= 3
    far = 0.0
    for name in units:
        block = made[0].curvature.blocks[name]
        found = approximations(block, settings, batch)
        true = made[1].curvature.blocks[name].dense()
        torch.testing.assert_close(Kronecker(found["kfac"]).dense(), true, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(Kronecker(found["xkfac"]).dense(), block.dense())
        difference = true - block.dense()
        torch.testing.assert_close(Kronecker(found["difference"]).dense(), difference, rtol=1e-7, atol=1e-11)
        assert len(found["difference"]) == len(settings.levels) - 1
        far = max(far, float(difference.abs().max() / true.abs().max()))
    assert far > 0.01  # the two are not the same in the first place


def test_kfac_of_a_memory_that_keeps_all_terms_is_that_of_a_kfac_memory():
    net, first, second = memories.make("mlp", dtype=WIDE)
    options = {"labels": "exact", "accumulation_dtype": WIDE}
    made = []
    for method in ("xkfac", "kfac"):
        memory = xkfac.consolidate(net, first, method, **options)
        new = xkfac.estimate(net, second, method, **options)
        made.append(memory.extend(net, new, weights=(0.3, 0.7), keep_all=True))
    for name, block in made[1].curvature.blocks.items():
        ours = made[0].curvature.blocks[name]
        found = approximations(ours, made[0].method.settings)
        torch.testing.assert_close(Kronecker(found["kfac"]).dense(), block.dense(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            Kronecker(found["difference"]).dense(), block.dense() - ours.dense(), rtol=1e-7, atol=1e-11
        )


@pytest.mark.parametrize("method", ["xkfac", "kfac"])
def test_kfac_of_an_average_of_several_tasks_is_shown_where_it_is_known(tmp_path, method):
    """The terms of XK-FAC are averaged by weights of their own, so A is not their sum; K-FAC's one term is K-FAC."""
    net, first, second = memories.make("mlp")
    memory = xkfac.consolidate(net, first, method)
    new = xkfac.estimate(net, second, method)
    for name, keep_all in (("average", False), ("all", True)):
        memory.extend(net, new, weights=(0.3, 0.7), keep_all=keep_all).save(tmp_path / name)
    averaged, kept = inspect_memory(tmp_path / "average")["entries"], inspect_memory(tmp_path / "all")["entries"]
    assert (averaged["kfac"] is None) == (method == "xkfac")
    assert kept["kfac"] is not None
    assert ("averages several tasks" in averaged["note"]) == (method == "xkfac")
    assert "averages" not in kept["note"]
    assert (averaged["xkfac"] is None) == (kept["xkfac"] is None) == (method == "kfac")


def test_what_the_factors_do_not_tell_is_said_and_not_invented():
    assert "K-FAC factors alone" in derivable(Settings("kfac"), None)
    assert "neither" in derivable(Settings("diagonal"), None)
    assert "neither" in derivable(Settings("corrected"), None)
    assert "--batch" in derivable(Settings(form="paper"), None)
    assert "hierarchical" in derivable(Settings(form="paper", grouping="hierarchical"), None)
    for settings in (Settings(), Settings("kfac"), Settings(form="paper", grouping="pooled")):
        with pytest.raises(XkfacError, match="batch=8 is for memories of XK-FAC in the paper's form"):
            derivable(settings, 8)
    with pytest.raises(XkfacError, match="at least 2"):
        derivable(Settings(form="paper"), 1)
    two = blocks()["two"]
    assert approximations(two, Settings(form="paper")) == {"xkfac": two.terms}
    one = blocks()["full"]
    assert approximations(one, Settings("kfac")) == {"kfac": one.terms}


# ---------------------------------------------------------------- memories


@pytest.mark.parametrize("name", ["xkfac", "kfac", "ewc", "corrected", "all"])
def test_the_facts_are_those_of_the_memory(run, name):
    path = memory_of(run, name)
    memory, found = Memory.load(path), inspect_memory(path)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["file"], found["tasks"], found["method"]) == (str(path), 2, memory.method.name)
    assert found["examples"] == memory.examples == 2 * 96
    assert [unit["unit"] for unit in found["units"]] == [unit.name for unit in memory.units]
    for unit in found["units"]:
        block = memory.curvature.blocks[unit["unit"]]
        values = torch.linalg.eigvalsh(block.dense().double()).flatten()
        assert memory.anchor[unit["unit"]].numel() == math.prod(map(int, unit["shape"].split("x")))
        assert unit["trace"] == pytest.approx(float(values.sum()), rel=1e-5)
        assert unit["largest"] == pytest.approx(float(values.max()), rel=1e-5)
        assert unit["effective rank"] == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-4)
        assert unit["anchor norm"] == pytest.approx(float(memory.anchor[unit["unit"]].norm()))
        assert len(unit["spectra"]) == (len(block.terms) if isinstance(block, Kronecker) else 1)


@pytest.mark.parametrize(("name", "terms"), [("xkfac", [1]), ("all", [1, 3])])
def test_the_share_between_examples_is_that_of_the_last_term_of_each_task(run, name, terms):
    found = inspect_memory(memory_of(run, name))
    memory = Memory.load(memory_of(run, name))
    for unit in found["units"]:
        block = memory.curvature.blocks[unit["unit"]]
        assert len(block.terms) == 2 * len(terms)
        trace = 0.0
        for term in (block.terms[k] for k in terms):
            trace += float(term.dense_left.diagonal(dim1=1, dim2=2).sum() * term.right.diagonal(dim1=1, dim2=2).sum())
        assert unit["between"] == pytest.approx(trace / unit["trace"], rel=1e-4)
        assert 0 < unit["between"] < 1


def test_the_mean_entries_of_a_memory_are_those_of_all_blocks_together(run):
    path = memory_of(run, "all")
    memory, found = Memory.load(path), inspect_memory(path)
    dense = {name: [] for name in inspection.NAMES}
    for block in memory.curvature.blocks.values():
        tasks = zip(block.terms[::2], block.terms[1::2], strict=True)
        terms = [Term(within.dense_left + between.dense_left, within.right) for within, between in tasks]
        kfac = Kronecker(tuple(terms)).dense()
        for name, matrix in (("kfac", kfac), ("xkfac", block.dense()), ("difference", kfac - block.dense())):
            dense[name].append(matrix.double().abs().flatten())
    for name, parts in dense.items():
        mean = found["entries"][name]
        every = torch.cat(parts)
        assert mean["count"] == len(every)
        assert mean["mean"] == pytest.approx(float(every.mean()), rel=1e-4)
        for unit, part in zip(found["units"], parts, strict=True):
            assert unit["entries"][name]["mean"] == pytest.approx(float(part.mean()), rel=1e-4)
    assert found["entries"]["note"] == ""


def test_a_memory_of_kfac_or_of_a_diagonal_says_that_it_knows_no_xkfac(run):
    found = inspect_memory(memory_of(run, "kfac"))
    assert (found["entries"]["xkfac"], found["entries"]["difference"]) == (None, None)
    assert found["entries"]["kfac"]["mean"] > 0
    assert "K-FAC factors alone" in found["entries"]["note"]
    assert {unit["between"] for unit in found["units"]} == {None}
    for name in ("ewc", "corrected"):
        found = inspect_memory(memory_of(run, name))
        assert {found["entries"][key] for key in inspection.NAMES} == {None}
        assert "neither K-FAC nor XK-FAC" in facts(found)["note"]
        assert {unit["entries"] for unit in found["units"]} == {None}


def test_units_joined_across_layers_have_the_numbers_of_their_diagonal_blocks(tmp_path):
    net, data, _ = memories.make("mlp")
    for form in ("paper", "mean"):
        alone, joint = (
            xkfac.consolidate(net, data, "xkfac", form=form, cross_layer=cross, labels="exact")
            for cross in (False, True)
        )
        for name, memory in (("alone", alone), ("joint", joint)):
            memory.save(tmp_path / name)
        one, other = (inspect_memory(tmp_path / name) for name in ("alone", "joint"))
        assert {unit["curvature"] for unit in other["units"]} == {"joint"}
        for mine, theirs in zip(one["units"], other["units"], strict=True):
            assert mine["shape"] == theirs["shape"]
            for key in ("trace", "between", "largest", "effective rank"):
                assert theirs[key] == pytest.approx(mine[key], rel=1e-4), (mine["unit"], key)


def test_the_paper_s_form_asks_for_the_size_of_the_mini_batches(tmp_path):
    net, data, _ = memories.make("mlp")
    xkfac.consolidate(net, data, "xkfac", form="paper", labels="exact").save(tmp_path / "paper")
    xkfac.consolidate(net, data, "kfac", labels="exact").save(tmp_path / "kfac")
    without, found = inspect_memory(tmp_path / "paper"), inspect_memory(tmp_path / "paper", batch=8)
    assert without["entries"]["kfac"] is None
    assert without["entries"]["xkfac"] == found["entries"]["xkfac"]
    assert "--batch" in without["entries"]["note"]
    true = inspect_memory(tmp_path / "kfac")["entries"]["kfac"]["mean"]
    assert found["entries"]["kfac"]["mean"] == pytest.approx(true, rel=1e-5)
    with pytest.raises(XkfacError, match="leave it out"):
        inspect_memory(tmp_path / "kfac", batch=8)


def test_units_are_shown_in_rows_and_their_progress_is_told(run):
    told = []
    found = inspect_memory(memory_of(run, "all"), show=lambda *place: told.append(place))
    assert told == [(k, 3, unit["unit"]) for k, unit in enumerate(found["units"])]
    head, *rows = unit_table(found)
    assert {len(row) for row in rows} == {len(head)}
    row = dict(zip(head, rows[0], strict=True))
    unit = found["units"][0]
    assert (row["unit"], row["shape"], row["trace"]) == (unit["unit"], "1x8x65", f"{unit['trace']:.3g}")
    last = unit["spectra"][2:]
    assert row["spectrum"] == "… + " + " + ".join(each["sparkline"] for each in last)
    assert row["90% of trace in"] == "… + " + " + ".join(f"{each['ninety']}/520" for each in last)
    assert row["K-FAC"].startswith(f"{unit['entries']['kfac']['mean']:.3g}")
    assert facts(found)["mean absolute entry of all blocks"].startswith("K-FAC ")
    assert row["largest"] == f"{unit['largest']:.3g}"


def test_a_memory_without_curvature_has_no_units_and_no_complaint(tmp_path):
    net, data, _ = memories.make("mlp")
    xkfac.consolidate(net, data, "fine-tuning").save(tmp_path / "plain")
    found = inspect_memory(tmp_path / "plain")
    assert (found["units"], found["entries"]["note"]) == ([], "")
    assert len(unit_table(found)) == 1
    assert "note" not in facts(found)


def test_the_calibration_of_a_memory_is_shown_with_its_curve(tmp_path):
    net, data, _ = memories.make("mlp")
    memory = xkfac.consolidate(net, data, "xkfac")
    memory.save(tmp_path / "without")
    found = inspect_memory(tmp_path / "without")
    assert (found["calibration"], calibration_table(found)) == (None, [])
    curve = (CurvePoint(0.01, 0.3), CurvePoint(0.02, 0.6), CurvePoint(0.5, 90.0))
    replace(memory, calibration=Calibration(30.0, 0.02, curve, 48)).save(tmp_path / "with")
    found = inspect_memory(tmp_path / "with")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["calibration"]["curve"][2] == {"predicted": 0.5, "real": 90.0}
    assert facts(found)["calibration"] == "scale 30, radius 0.02, measured on 48 examples"
    assert calibration_table(found) == [
        ["predicted", "scaled", "real", "trusted"],
        ["0.01", "0.3", "0.3", "yes"],
        ["0.02", "0.6", "0.6", "yes"],
        ["0.5", "15", "90", "no"],
    ]


def test_what_is_no_memory_is_refused(run, tmp_path):
    for path in (tmp_path, tmp_path / "none", run.path / "recipe.toml", *run.path.rglob("checkpoint-*.safetensors")):
        with pytest.raises(MemoryFileError):
            inspect_memory(path)
