"""What README shows runs as it stands."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xkfac

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_use_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    loaders = [[(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)] for _ in range(2)]
    names = {
        "F": F,
        "model": model,
        "held_out_source_loader": loaders[0],
        "target_loader": loaders[1],
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    exec(code, names)
    assert isinstance(names["memory"], xkfac.Memory)
    assert names["memory"].tasks == 2
    assert (tmp_path / "source.safetensors").is_file()


def test_every_method_it_names_exists():
    text = README.read_text()
    named = set(re.findall(r'"([a-z-]+)"', text)) - {"source"}
    assert set(xkfac.METHODS) - {"xkfac"} <= named
