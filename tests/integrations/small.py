"""A small network with data of two tasks, and the plain training loop that adapters are compared with."""

import functools
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xkfac


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def examples(seed, batches=4, size=8):
    """Return inputs and labels of a task."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * size, 6, generator=generator) * (1 + seed) + seed
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


def batches(seed, number=4, size=8):
    x, y = examples(seed, number, size)
    return list(zip(x.split(size), y.split(size), strict=True))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def bare_loop(
    model, memory, loader, *, epochs=2, passes=1, clip=None, autocast=None, scaler=None, make=sgd, implicit=True
):
    """Learn a task as README shows it, with micro-batches, clipping and half precision where asked for."""
    learner = xkfac.Learner(model, memory, penalty_every=None if clip is None and scaler is None else 1)
    optimizer = make(model.parameters())
    learner.begin(loader, optimizer if implicit and make is sgd else None)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    model.train()
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(learner.objective(loss, share=1 / passes)).backward()
            if (index + 1) % passes == 0:
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return learner.finish(loader)


def same_network(one, other, rtol=1e-5, atol=1e-6):
    """Assert that two networks have the same weights and statistics."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, found), (_, expected) in pairs:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def same_memory(one, other, rtol=1e-4):
    """Assert that two memories have the same anchor and the same curvature, whatever the prefix of their units."""
    assert one.tasks == other.tasks
    for found, expected in zip(one.anchor.values(), other.anchor.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    for (_, found), (_, expected) in zip(one.curvature.tensors(), other.curvature.tensors(), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5 * float(expected.abs().max()))


def run_page(name, names, monkeypatch):
    """Run the first block of Python of a how-to page, of which at most six lines are not the framework's own."""
    quick = functools.partial(xkfac.calibrate, tasks=1)
    monkeypatch.setattr(xkfac, "calibrate", quick)
    page = Path(__file__).parents[2] / "docs" / "how-to" / f"{name}.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert sum("xkfac" in line.lower() or "memory" in line for line in code.splitlines()) <= 6
    exec(code, names)
