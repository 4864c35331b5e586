"""Regression: find the centre of the ink of a digit, then of digits with permuted pixels; the loss is F.mse_loss."""

import copy

import torch
import torch.nn.functional as F
from digits import fine_tune, images, loaders, network

import xkfac

K = 2  # outputs per example


def centres(task):
    """Return images and the centre of mass of each, in pixels from the middle."""
    ink = (images()[0].view(-1, 8, 8) + 1) / 2
    place = torch.arange(8.0) - 3.5
    total = ink.sum((1, 2))
    return images(task)[0], torch.stack([ink.sum(2) @ place / total, ink.sum(1) @ place / total], 1) * 4


@torch.no_grad()
def error(model, loader):
    """Return the mean squared error."""
    model.eval()
    return sum(F.mse_loss(model(x), y, reduction="sum").item() for x, y in loader) / K / len(loader.dataset)


torch.manual_seed(0)
source, held_out_source, source_test = loaders(*centres(task=0))
target, _, target_test = loaders(*centres(task=1))
model = network(K)
fine_tune(model, source, 10, F.mse_loss)
before = error(model, source_test)

# F.mse_loss is the mean over examples and outputs: the Gaussian of the same curvature has the variance K / 2
memory = xkfac.consolidate(model, held_out_source, likelihood=xkfac.Gaussian(variance=K / 2))
memory = xkfac.calibrate(model, memory, held_out_source)

unprotected = copy.deepcopy(model)
fine_tune(unprotected, target, 5, F.mse_loss)

learner = xkfac.Learner(model, memory)
learner.begin(target)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
model.train()
for _ in range(5):
    for x, y in target:
        loss = learner.objective(F.mse_loss(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
memory = learner.finish(target)

forgetful, kept = error(unprotected, source_test), error(model, source_test)
print(f"error on the source before {before:.3f}, after fine-tuning {forgetful:.3f}, with xkfac {kept:.3f}")
without, learnt = error(unprotected, target_test), error(model, target_test)
print(f"error on the target after fine-tuning {without:.3f}, with xkfac {learnt:.3f}")
