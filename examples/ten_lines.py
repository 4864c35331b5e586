"""The ten lines on your own network: learn a second task and keep the first, whose data is gone by then."""

import copy

import torch
import torch.nn.functional as F
from digits import accuracy, fine_tune, images, loaders, network

import xkfac

torch.manual_seed(0)
source, held_out_source_loader, source_test = loaders(*images(task=0))
target_loader, held_out_target_loader, target_test = loaders(*images(task=1))
model = network()
fine_tune(model, source, epochs=8)
before = accuracy(model, source_test)

memory = xkfac.consolidate(model, held_out_source_loader)  # once, while the source data is there
memory = xkfac.calibrate(model, memory, held_out_source_loader)
memory.save("source.safetensors")

unprotected = copy.deepcopy(model)
fine_tune(unprotected, target_loader)

optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
memory = xkfac.Memory.load("source.safetensors", model)  # later, elsewhere, without the data
learner = xkfac.Learner(model, memory)
learner.begin(target_loader, optimizer)
model.train()
for _ in range(5):
    for x, y in target_loader:
        loss = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
memory = learner.finish(held_out_target_loader)  # the memory of both tasks

forgetful, kept = accuracy(unprotected, source_test), accuracy(model, source_test)
print(f"source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
without, learnt = accuracy(unprotected, target_test), accuracy(model, target_test)
print(f"target after fine-tuning {without:.1f}%, with xkfac {learnt:.1f}%")
