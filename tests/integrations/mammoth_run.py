"""What `test_mammoth.py` runs in a process of its own, since Mammoth changes the working folder: FILE, the result."""

import argparse
import copy
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests import conftest as conftest  # torchvision's operators
from tests.helpers.setups import data, mlp


class Data:
    """The part of a `ContinualDataset` that models use, with the fixed batches of two tasks."""

    N_CLASSES, N_TASKS, N_CLASSES_PER_TASK, SETTING = 3, 2, 3, "domain-il"

    def __init__(self):
        self.loaders = [[(x, y, x) for x, y in data(6, shift=t, scale=1 + t, seed=t)] for t in range(2)]
        self.train_loader = self.loaders[0]

    def get_offsets(self, task):
        return 3 * task, 3 * (task + 1)

    def get_normalization_transform(self):
        return None


def in_mammoth(folder, backbone, path):
    """Return the memory after two tasks, learnt with Mammoth's own class."""
    sys.path.insert(0, folder)
    for dataset in Path(folder, "datasets").glob("seq_*.py"):
        if "open_clip" in dataset.read_text(encoding="utf-8"):  # downloads weights when it is imported
            sys.modules[f"datasets.{dataset.stem}"] = types.ModuleType(dataset.stem)
    from xkfac.integrations.mammoth import XKFAC

    args = XKFAC.get_parser(argparse.ArgumentParser()).parse_args(["--xkfac_strength", "3", "--xkfac_memory", path])
    own = {"lr": 0.05, "optimizer": "sgd", "optim_wd": 0.0, "optim_mom": 0.9, "optim_nesterov": 0}
    args = argparse.Namespace(**vars(args), **own, label_perc=1, nowand=1, seed=0, device="cpu", gpu_memory="all")
    dataset = Data()
    model = XKFAC(backbone, nn.CrossEntropyLoss(), args, None, dataset)
    model.device = torch.device("cpu")
    for loader in dataset.loaders:
        dataset.train_loader = loader
        model.net.train()
        model.meta_begin_task(dataset)
        model.opt = model.get_optimizer()  # as Mammoth does where there is a scheduler
        for x, y, plain in loader:
            model.meta_observe(x, y, plain, epoch=0)
        model.meta_end_task(dataset)
    model.meta_begin_task(dataset)  # a task without a step, as `--start_from` has them, changes nothing
    model.meta_end_task(dataset)
    return model.tasks.memory


def by_hand(net):
    """Return the memory after the same batches in a bare loop."""
    memory = None
    for loader in Data().loaders:
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        learner = None if memory is None else xkfac.Learner(net, memory, strength=3.0)
        if learner is not None:
            learner.begin(loader, optimizer)
        net.train()
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            (loss if learner is None else learner.objective(loss)).backward()
            optimizer.step()
        memory = xkfac.consolidate(net, loader) if learner is None else learner.finish(loader)
    return memory


if __name__ == "__main__":
    torch.manual_seed(0)
    mammoth, path = sys.argv[1:]
    net = mlp()
    bare = copy.deepcopy(net)
    found, wanted = in_mammoth(mammoth, net, path), by_hand(bare)
    for a, b in zip(net.state_dict().values(), bare.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    for (_, a), (_, b) in zip(found.curvature.tensors(), wanted.curvature.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    print(found.tasks, xkfac.Memory.load(path, net).tasks)
