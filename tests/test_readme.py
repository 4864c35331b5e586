"""What README shows runs as it stands."""

import re
from pathlib import Path

import xkfac
from tests.helpers.readme_example import run_example

README = Path(__file__).parent.parent / "README.md"


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
