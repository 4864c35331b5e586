"""Segmentation: which pixels of a noisy image are ink? First the ink is plain, then it is striped."""

import copy

import torch
import torch.nn.functional as F
from digits import images
from torch import nn
from torch.utils.data import DataLoader

import xkfac


def scenes(stripes):
    """Return loaders of 16x16 images with their masks, as dicts: for training, held out, and for the test."""
    mask = F.interpolate(images()[0][:480].view(-1, 1, 8, 8), scale_factor=2) > 0
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    image = mask * torch.tensor(stripes).repeat(8) + 0.6 * noise
    items = [{"image": x, "mask": y[0].long()} for x, y in zip(image, mask, strict=True)]
    return [DataLoader(part, 32) for part in (items[:320], items[320:400], items[400:])]


class Network(nn.Module):
    """A convolutional network that returns a dict, as those of torchvision do."""

    def __init__(self):
        super().__init__()
        block = lambda a, b: (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())  # noqa: E731
        self.body = nn.Sequential(*block(1, 16), *block(16, 16), nn.Conv2d(16, 2, 1))

    def forward(self, image):
        """Return scores [N, 2, height, width]."""
        return {"out": self.body(image)}


def loss_of(model, batch):
    """Return the cross-entropy, a mean over pixels: so the penalty is per pixel too, and needs no factor."""
    return F.cross_entropy(model(batch["image"])["out"], batch["mask"])


def fine_tune(model, loader, objective=lambda loss: loss, epochs=6):
    """Train a network on an objective."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    model.train()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            objective(loss_of(model, batch)).backward()
            optimizer.step()


@torch.no_grad()
def overlap(model, loader):
    """Return the intersection over union of the ink, in percent."""
    model.eval()
    pairs = [(model(batch["image"])["out"].argmax(1) == 1, batch["mask"] == 1) for batch in loader]
    return 100 * sum((a & b).sum().item() for a, b in pairs) / sum((a | b).sum().item() for a, b in pairs)


torch.manual_seed(0)
source, held_out_source, source_test = scenes([1.0, 1.0])
target, _, target_test = scenes([1.0, -1.0])
model = Network()
fine_tune(model, source)
before = overlap(model, source_test)

memory = xkfac.consolidate(model, held_out_source, forward=lambda model, batch: model(batch["image"])["out"])
memory = xkfac.calibrate(model, memory, held_out_source)

unprotected = copy.deepcopy(model)
fine_tune(unprotected, target)

learner = xkfac.Learner(model, memory)
learner.begin(target)
fine_tune(model, target, learner.objective)
memory = learner.finish(target)

forgetful, kept = overlap(unprotected, source_test), overlap(model, source_test)
print(f"overlap on the source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
without, learnt = overlap(unprotected, target_test), overlap(model, target_test)
print(f"on the target after fine-tuning {without:.1f}%, with xkfac {learnt:.1f}%")
