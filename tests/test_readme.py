"""What README shows runs as it stands."""

import io
import re
import tokenize
from pathlib import Path

import pytest

import xkfac
from tests.helpers.readme_example import run_example

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def ten_lines(page):
    (code, *_) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return lines_of(code)


def lines_of(code):
    """Lines of code without comments, indentation and what is empty."""
    code_lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            code_lines[token.start[0] - 1] = token.line[: token.start[1]]
    return [line.strip() for line in code_lines if line.strip()]


def test_the_example_of_use_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example(README)
    assert isinstance(names["memory"], xkfac.Memory)
    assert names["memory"].tasks == 2
    assert (tmp_path / "source.safetensors").is_file()


def test_every_method_it_names_exists():
    text = README.read_text()
    named = set(re.findall(r'"([a-z-]+)"', text)) - {"source"}
    assert set(xkfac.METHODS) - {"xkfac"} <= named


def test_the_first_page_shows_the_same_ten_lines():
    assert ten_lines(ROOT / "docs" / "index.md") == ten_lines(README)


@pytest.mark.parametrize("script", ["ten_lines.py", "imagenet_to_cars.py"])
def test_examples_have_the_ten_lines_unchanged(script):
    wanted = ten_lines(README)
    found = lines_of((ROOT / "examples" / script).read_text())
    assert [line for line in found if line in wanted] == wanted
    others = [line for line in found if line not in wanted]
    assert [line for line in others if re.search(r"memory =|learner\.(?!stable_lr|protected)", line)] == []
