"""Task-specific BN and heads: the task of each input is known, so only the weights of the layers are shared."""

import copy

import torch
import torch.nn.functional as F
from digits import accuracy, fine_tune, images, loaders, network

import xkfac

torch.manual_seed(0)
source, held_out_source, source_test = loaders(*images(task=0))
target, _, target_test = loaders(*images(task=1))
model = network()
fine_tune(model, source)
before = accuracy(model, source_test)

xkfac.give_task_layers(model, ["source", "target"], ["6"])  # the head: a layer per task
xkfac.give_task_norms(model, ["source", "target"])  # every BN too
xkfac.enter_task(model, "source")
memory = xkfac.consolidate(model, held_out_source, "own-bn")
memory = xkfac.calibrate(model, memory, held_out_source)

xkfac.enter_task(model, "target")  # its layers run and learn, those of the source stand still
unprotected = copy.deepcopy(model)
fine_tune(unprotected, target)

optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
learner = xkfac.Learner(model, memory)
learner.begin(target, optimizer)
model.train()
for _ in range(5):
    for x, y in target:
        loss = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
memory = learner.finish(target)
learnt = accuracy(model, target_test)

with xkfac.using_task(model, "source"), xkfac.using_task(unprotected, "source"):
    forgetful, kept = accuracy(unprotected, source_test), accuracy(model, source_test)
print(f"source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
print(f"target with xkfac {learnt:.1f}%")
