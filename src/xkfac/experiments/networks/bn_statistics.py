"""Weights whose BN statistics fit images of another size than the network was trained on."""

from pathlib import Path

import torch

from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import stream
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.data.trees import Tree
from xkfac.experiments.networks.backbones import Stem, make_backbone
from xkfac.experiments.networks.weights import load_source, save_source
from xkfac.experiments.recipes.recipe import Resize
from xkfac.model.passes import norms_of

_BATCH = 250
_TASK = "source"


@torch.no_grad()
def estimate_statistics(
    model: str,
    weights: str | Path,
    output: str | Path,
    *,
    tree: str | Path,
    pixels: int,
    resize: Resize = "squash",
    stem: Stem = "standard",
    device: str | torch.device = "cpu",
) -> None:
    """Write weights with BN statistics that are estimated anew; all else is as it was, in float32.

    They are of all images in the train part of a tree, as evaluation sees them, in batches of 250 in an order that is
    always the same: the mean of the batches' means and variances.

    Raises DataError, BackboneError or WeightsError for whatever is missing, damaged, or does not fit.
    """
    listed = Tree.read(tree)
    network = make_backbone(model, {_TASK: len(listed.classes)}, stem=stem, seed=0)
    facts = load_source(network, weights, _TASK)
    pictures = load_pictures(listed, pixels=pixels, resize=resize, validation=0.0, parts=("train",)).train
    plain = Augmentation(pixels, (1.0, 1.0)).plain
    network.to(device).eval()
    norms = norms_of(network).values()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True  # None: all batches count alike
    # In the order of a tree a batch would have few classes, and too small a variance.
    order = torch.randperm(len(pictures), generator=stream("statistics"), device="cpu")
    for index in torch.split(order, _BATCH):
        if len(index) > 1 or len(order) == 1:
            network(plain(pictures.x[index]).to(device))
    save_source(network, output, _TASK, facts)
