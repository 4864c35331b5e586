"""Several heads: the digits 0 to 4, then 5 to 9 with permuted pixels, each with a head of its own on one trunk."""

import copy

import torch
import torch.nn.functional as F
from digits import accuracy, fine_tune, images, loaders, network
from torch import nn

import xkfac

torch.manual_seed(0)
x, y = images(classes=range(5))
source, held_out_source, source_test = loaders(x, y)
x, y = images(task=1, classes=range(5, 10))
target, _, target_test = loaders(x, y - 5)
model = nn.Sequential()
model.trunk, model.head = network()[:-1], nn.Linear(64, 5)
fine_tune(model, source)
before = accuracy(model, source_test)

memory = xkfac.consolidate(model, held_out_source, exclude=["head"])  # heads are yours to keep
memory = xkfac.calibrate(model, memory, held_out_source)

heads = {"source": model.head}
model.head = nn.Linear(64, 5)  # swap heads before you make the learner
unprotected = copy.deepcopy(model)
fine_tune(unprotected, target, epochs=15)

optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
learner = xkfac.Learner(model, memory)
learner.begin(target, optimizer)
model.train()
for _ in range(15):
    for x, y in target:
        loss = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
memory = learner.finish(target)
heads["target"] = model.head
learnt = accuracy(model, target_test)

model.head = unprotected.head = heads["source"]  # the source again
forgetful, kept = accuracy(unprotected, source_test), accuracy(model, source_test)
print(f"source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
print(f"target with xkfac {learnt:.1f}%")
