"""Resume in the middle of a task: a run that stopped after two epochs goes on as if it had not."""

import copy

import torch
import torch.nn.functional as F
from digits import fine_tune, images, loaders, network

import xkfac

torch.manual_seed(0)
source, held_out_source, _ = loaders(*images(task=0))
_, target, _ = loaders(*images(task=1))  # the held-out part is not shuffled: the order of batches is yours to restore
model = network()
fine_tune(model, source)
xkfac.consolidate(model, held_out_source).save("source.safetensors")
start = copy.deepcopy(model)


def learn(model, first, last, checkpoint=None):
    """Learn the target from one epoch to another, from the start or from a checkpoint; return a checkpoint."""
    memory = xkfac.Memory.load("source.safetensors", start)  # the memory from before the task
    learner = xkfac.Learner(model, memory)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    if checkpoint is None:
        learner.begin(target)
    else:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        learner.load_state_dict(state["learner"])  # in place of begin
    model.train()
    for _ in range(first, last):
        for x, y in target:
            optimizer.zero_grad()
            learner.objective(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "learner": learner.state_dict()}
    learner.close()
    return state


unbroken = learn(copy.deepcopy(start), 0, 5)
torch.save(learn(copy.deepcopy(start), 0, 2), "checkpoint.pt")
resumed = learn(copy.deepcopy(start), 2, 5, "checkpoint.pt")
same = all(torch.equal(one, resumed["model"][name]) for name, one in unbroken["model"].items())
print("the resumed run has", "the same" if same else "OTHER", "weights and statistics, bit by bit")
