"""Avalanche: two experiences of permuted digits, with the plugin and without it (needs the extra `avalanche`)."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.supervised import Naive
from digits import accuracy, images, loaders, network

from xkfac.integrations.avalanche import XKFACPlugin

tasks = [loaders(*images(task)) for task in range(2)]
train, held_out, _ = ([AvalancheDataset([loader.dataset]) for loader in part] for part in zip(*tasks, strict=True))
benchmark = benchmark_from_datasets(train=train, valid=held_out)

averages = []
for plugins in ([], [XKFACPlugin(held_out=benchmark.streams["valid"])]):
    torch.manual_seed(0)
    model = network()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        train_mb_size=32,
        train_epochs=10,
        plugins=plugins,
        evaluator=None,
    )
    for experience in benchmark.streams["train"]:
        strategy.train(experience)
    found = [accuracy(model, test) for _, _, test in tasks]
    averages.append(sum(found) / len(found))
    shown = " ".join(f"{one:.1f}%" for one in found)
    print(f"{'with' if plugins else 'without'} the plugin: {shown}, {averages[-1]:.1f}% on average")
forgetful, kept = averages
