"""What a memory file holds, in numbers that a person can judge."""

import json
import math

import pytest

from tests.experiments import small_runs as small
from xkfac import Memory, MemoryFileError
from xkfac.experiments.inspection import inspect_memory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = small.recipe('lines.all={ keep = "all" }').only(["xkfac", "kfac", "ewc", "corrected", "all"])
    return small.finish(small.make(tmp_path_factory.mktemp("runs") / "run", recipe))


def memory_of(run, name):
    return run.job(name, 0).path / "memory-2.safetensors"


@pytest.mark.parametrize("name", ["xkfac", "kfac", "ewc", "corrected"])
def test_the_facts_are_those_of_the_memory(run, name):
    path = memory_of(run, name)
    memory, found = Memory.load(path), inspect_memory(path)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["file"], found["tasks"], found["method"]) == (str(path), 2, name)
    assert found["examples"] == memory.examples == 2 * 96
    assert [unit["unit"] for unit in found["units"]] == [unit.name for unit in memory.units]
    for unit in found["units"]:
        block = memory.curvature.blocks[unit["unit"]]
        assert memory.anchor[unit["unit"]].numel() == math.prod(map(int, unit["shape"].split("x")))
        assert unit["trace"] == pytest.approx(float(block.diagonal().double().sum()), rel=1e-5)
        assert unit["trace"] > 0
        assert unit["anchor norm"] == pytest.approx(float(memory.anchor[unit["unit"]].norm()))


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


def test_factors_of_independent_examples_have_no_share_between_them(run):
    assert {unit["between"] for unit in inspect_memory(memory_of(run, "kfac"))["units"]} == {"-"}


def test_what_is_no_memory_is_refused(run, tmp_path):
    for path in (tmp_path, tmp_path / "none", run.path / "recipe.toml", *run.path.rglob("checkpoint-*.safetensors")):
        with pytest.raises(MemoryFileError):
            inspect_memory(path)
