"""The model for Mammoth does what the bare loop does, with Mammoth's own base class."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif("MAMMOTH" not in os.environ, reason="Mammoth is no package: MAMMOTH names no clone of it")
def test_two_tasks_in_mammoth_are_those_of_the_bare_loop(tmp_path):
    command = [sys.executable, "-m", "tests.integrations.mammoth_run", os.environ["MAMMOTH"], str(tmp_path / "memory")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["2 2"], done.stderr


def test_the_page_names_the_file_and_the_line():
    page = (ROOT / "docs" / "how-to" / "mammoth.md").read_text()
    assert "models/xkfac.py" in page
    assert "from xkfac.integrations.mammoth import XKFAC" in page
