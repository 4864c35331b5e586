"""README's example of use, with a small network and data to run it on.

Needs torch and xkfac alone, so that a clean environment can run it: python readme_example.py README.md
"""

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


def run_example(readme):
    """Run the only block of Python in README, in the current folder; return its names with their values."""
    (code,) = re.findall(r"```python\n(.*?)```", Path(readme).read_text(encoding="utf-8"), re.DOTALL)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    loaders = [[(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)] for _ in range(3)]
    names = {
        "F": F,
        "model": model,
        "held_out_source_loader": loaders[0],
        "target_loader": loaders[1],
        "held_out_target_loader": loaders[2],
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    exec(code, names)
    return names


if __name__ == "__main__":
    print(run_example(sys.argv[1])["memory"].tasks)
