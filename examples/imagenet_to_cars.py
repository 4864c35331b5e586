"""README's ten lines on a real network: a ResNet-50 that knows ImageNet learns Cars.

    python examples/imagenet_to_cars.py --data FOLDER

docs/fine-grained.md says what is in FOLDER ("How to run it at 128 pixels"). Other trees: --source and --target.
The memory, source.safetensors, goes into the current folder and takes 1 to 2 GB for a ResNet-50.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import xkfac
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.data.trees import find_tree
from xkfac.experiments.networks.library import classifier_path, library_model

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--data", type=Path, required=True, help="the folder of the trees and the weights")
options.add_argument("--model", default="resnet50", help="a network of torchvision")
options.add_argument("--weights", type=Path, help="by default MODEL-imagenet-128.safetensors in the folder")
options.add_argument("--source", default="imagenet1000-128", help="the tree that the network knows")
options.add_argument("--target", default="cars196-128", help="the tree that it learns")
options.add_argument("--pixels", type=int, default=128)
options.add_argument("--epochs", type=int, default=8)
options.add_argument("--lr", type=float, default=0.8, help="of the first epoch; it falls along a half cosine")
options.add_argument("--seed", type=int, default=0)
options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = options.parse_args()
BATCH, LAST_LR = 32, 1e-4
PREPARE = Augmentation(args.pixels, scale=(1.0, 1.0))  # normalise, and mirror at random


def loader(images, training=False):
    """Return batches in a new order each time; for training, whole ones of images that are mirrored at random."""

    def batch(index):
        x, y = images.x[index], images.y[index]
        draws = PREPARE.draw((len(x),), torch.default_generator).to(x.device)
        return PREPARE.augmented(x, draws) if training else PREPARE.plain(x), y

    return DataLoader(range(len(images)), BATCH, shuffle=True, drop_last=training, collate_fn=batch)


@torch.no_grad()
def accuracy(task, images):
    """Return the percentage of images that the network gets right with the head of a task."""
    model.eval()
    with xkfac.using_task(model, task):
        return 100 * sum((model(x).argmax(1) == y).sum().item() for x, y in loader(images)) / len(images)


torch.manual_seed(args.seed)
trees = (find_tree(name, args.data) for name in (args.source, args.target))
read = {"pixels": args.pixels, "resize": "squash", "validation": 0.1}
source, target = (load_pictures(tree, **read).to(args.device) for tree in trees)
held_out_source_loader = loader(source.train)
target_loader, held_out_target_loader = loader(target.train, training=True), loader(target.validation)

model = library_model(args.model, num_classes=len(source.classes))
model.load_state_dict(load_file(args.weights or args.data / f"{args.model}-imagenet-128.safetensors"))
path = classifier_path(args.model, model)
head = model.get_submodule(path)
heads = xkfac.TaskLayer({"source": head, "target": nn.Linear(head.in_features, len(target.classes))})
model.set_submodule(path, heads)  # a head per task; the memory leaves heads out
model.to(args.device, memory_format=torch.channels_last)
xkfac.enter_task(model, "source")
before = accuracy("source", source.test), accuracy("target", target.test)

memory = xkfac.consolidate(model, held_out_source_loader)  # once, while the source data is there
memory = xkfac.calibrate(model, memory, held_out_source_loader)  # measure how strong the penalty must be
memory.save("source.safetensors")

xkfac.enter_task(model, "target")  # its head learns, that of the source stands still
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.epochs - 1, 1), LAST_LR)
memory = xkfac.Memory.load("source.safetensors", model)  # later, elsewhere, without the data
learner = xkfac.Learner(model, memory)
learner.begin(target_loader, optimizer)
print(memory, flush=True)
for epoch in range(args.epochs):
    model.train()
    for x, y in target_loader:
        loss = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
memory = learner.finish(held_out_target_loader)  # the memory of both tasks

after = accuracy("source", source.test), accuracy("target", target.test)
for name, old, new in zip(("source", "target"), before, after, strict=True):
    print(f"{name}: {old:.1f}% before, {new:.1f}% after")
