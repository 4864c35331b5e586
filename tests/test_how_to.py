"""The lines of how-to pages that no example has run as they are written."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from xkfac.learning import calibrator

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
LEARN = "...  # learn the target as always"


class Block(nn.Module):
    """A convolution with BN beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))

    def forward(self, x):
        return F.relu(self.bn1(self.conv1(x)) + self.downsample(x))


class Net(nn.Module):
    """A small network whose layers have the names of a ResNet's, and as many features."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2, self.layer3 = Block(), Block(), Block()
        self.layer4, self.bn = nn.Conv2d(4, 512, 1, bias=False), nn.BatchNorm2d(512)
        self.fc = nn.Linear(512, 10)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(F.relu(self.bn(self.layer4(x))).mean((2, 3)))


def batches(classes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator) + seed, torch.randint(classes, (8,), generator=generator))
        for _ in range(2)
    ]


def learn(model, learner, optimizer, loader):
    """Learn the target in the usual way."""
    model.train()
    for x, y in loader:
        loss = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@pytest.mark.filterwarnings("ignore:the penalty without damping")
@pytest.mark.parametrize("page", ["heads", "task-layers", "unknown-tasks", "forgetting"])
def test_the_lines_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrator, "LONGEST", 8)
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        model, source, target = Net(), batches(10, 0), batches(200, 1)
        names = {"xkfac": xkfac, "torch": torch, "nn": nn, "model": model, "x": target[0][0], "lr": 0.01}
        names |= {"source_loader": source, "held_out_source_loader": source, "stream": source[0][0].split(2)}
        names |= {"target_loader": target, "held_out_target_loader": target, "learn": learn}
        names["torchvision"] = SimpleNamespace(models=SimpleNamespace(resnet18=Net))
        if "memory = " not in block:
            names["memory"] = xkfac.consolidate(model, source, draws=1)
        lines = block.replace(LEARN, "learn(model, learner, optimizer, target_loader)")
        exec(compile(lines, page, "exec"), names)
