"""Every script in examples/ runs as it stands, and keeps more of the source than plain fine-tuning does.

Calibration, most of the time of these scripts, takes one round here, and all of them in `make examples`.
"""

import functools
import os
import runpy
from pathlib import Path

import pytest

import xkfac

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "digits.py")
FRAMEWORKS = ("lightning", "transformers", "accelerate", "avalanche", "laplace")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    if "WHOLE_EXAMPLES" not in os.environ:
        monkeypatch.setattr(xkfac, "calibrate", functools.partial(xkfac.calibrate, tasks=1))
    try:
        names = runpy.run_path(str(script), run_name="__main__")
    except ImportError as error:
        if error.name not in FRAMEWORKS:
            raise
        pytest.skip(f"needs {error.name}")
    if script.stem == "resuming":
        assert names["same"]
    elif script.stem == "uncertainty":
        among, gap, away = names["deviations"]
        assert min(gap, away) > 3 * among
    elif script.stem == "regression":
        assert names["kept"] < 0.3 * names["forgetful"]
    else:
        assert names["kept"] > names["forgetful"] + 2
