"""What the examples share: tasks made of scikit-learn's digits, a network with BN, plain training, accuracy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset


def images(task=0, classes=range(10)):
    """Return images [N, 64] and labels of some classes; every task has its own fixed order of the pixels."""
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = (x.float() - 8) / 8
    if task > 0:
        x = x[:, torch.randperm(64, generator=torch.Generator().manual_seed(task))]
    chosen = torch.isin(y, torch.tensor(list(classes)))
    return x[chosen], y[chosen]


def loaders(x, y, batch_size=64):
    """Return loaders of a training, a held-out and a test set: 60, 20 and 20% of the examples."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    a, b = round(0.6 * len(x)), round(0.8 * len(x))
    train, *others = (TensorDataset(x[part], y[part]) for part in (order[:a], order[a:b], order[b:]))
    samplers = [RandomSampler(train), *map(SequentialSampler, others)]
    whole = [BatchSampler(sampler, batch_size, drop_last=False) for sampler in samplers]  # a batch is read at once
    return [DataLoader(part, None, sampler=one) for part, one in zip((train, *others), whole, strict=True)]


def network(outputs=10):
    """Return a perceptron with BN."""
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()),
        *(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()),
        nn.Linear(64, outputs),
    )


def fine_tune(model, loader, epochs=5, loss_of=F.cross_entropy):
    """Train without any protection."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, loader):
    """Return the percentage of right answers."""
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return 100 * right / len(loader.dataset)
