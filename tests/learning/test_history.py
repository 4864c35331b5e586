"""What a learner notes of its steps is what they had."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac


def test_history_has_the_loss_and_the_penalty_of_every_sixteenth_step(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    memory = xkfac.consolidate(net, [batch])
    learner = xkfac.Learner(net, memory, penalty_every=1)
    learner.begin([batch])
    with pytest.raises(xkfac.XkfacError, match="no step of this task was seen yet"):
        learner.history.plot(tmp_path / "history.png")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    seen = {}
    for step in range(1, 51):
        loss = F.cross_entropy(net(batch[0]), batch[1])
        optimizer.zero_grad()
        learner.objective(loss).backward()
        seen[step] = loss.item(), learner.last_penalty.item()
        optimizer.step()
    history = learner.history
    assert history.steps == [16, 32, 48]
    assert list(zip(history.losses, history.penalties, strict=True)) == [seen[step] for step in history.steps]
    assert history.over_radius == []
    history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
