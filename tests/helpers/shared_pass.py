"""What the processes of `test_processes.py` do: networks and mini-batches."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xkfac
from tests.helpers.setups import Everything, data, mlp, randomise
from xkfac.curvature import assemble

SIZES = (8, 5, 7, 1, 6)
IMAGES = {"shape": (2, 7, 7), "scale": 2.0, "shift": 3.0}
# What is estimated on a network with one unit of every kind.
KINDS = {
    "mean": {},
    "paper": {"form": "paper"},
    "pooled": {"grouping": "pooled"},
    "pooled, paper's form": {"grouping": "pooled", "form": "paper"},
    "hierarchical": {"grouping": "hierarchical"},
    "hierarchical, paper's form": {"grouping": "hierarchical", "form": "paper"},
    "kfac": {"kind": "kfac"},
    "diagonal": {"kind": "diagonal"},
    "free": {"kind": "diagonal", "per_parameter": True},
    "corrected": {"kind": "corrected"},
    "exact": {"labels": "exact", "form": "paper"},
    "exact mean": {"labels": "exact"},
    "empirical": {"labels": "empirical"},
    "population": {"statistics": "population"},
    "gaussian": {"likelihood": "gaussian"},
    "single": {"accumulation_dtype": torch.float32},
}
OWN_ONLY = {"unmerged": {"merge": False}}
# By the number of processes: four on few cores take turns, so that they do a part of it.
SHARED = {
    2: [*KINDS, *OWN_ONLY],
    4: ["mean", "hierarchical, paper's form", "free", "corrected", "paper", "unmerged"],
}
# What is estimated on a network whose BN layers are synchronised.
SYNCHRONISED = ("mean", "paper", "corrected", "unmerged")


def synchronised(net):
    """Return a parallel network, its BN layers synchronised once it is one: on a CPU torch refuses them before."""
    parallel = nn.parallel.DistributedDataParallel(net)
    nn.SyncBatchNorm.convert_sync_batchnorm(net)
    return parallel


def everything():
    torch.manual_seed(0)
    return randomise(Everything()).double()


def perceptron():
    torch.manual_seed(1)
    return mlp().double()


@functools.cache
def whole(count=5, **changes):
    """Return the mini-batches of the whole pass, of different sizes, their number not a multiple of the processes'."""
    made = [data(1, SIZES[k], classes=3, seed=k, **changes)[0] for k in range(count)]
    return [(x.double(), y) for x, y in made]


def images(count=5):
    return whole(count, **IMAGES)


def several_sizes():
    """Return the images of the whole pass, padded such that each process has some of another size."""
    return [(nn.functional.pad(x, (0, 0, 0, 2 * place)), y) for place, (x, y) in enumerate(images())]


def drawn(name):
    """Return the options of a kind, with few draws but for the first, which has as many as the pass has by itself."""
    options = {**KINDS, **OWN_ONLY}[name]
    return options if name == "mean" or "labels" in options else {**options, "draws": 2}


class Counted:
    """Counts the numbers that collective operations are given, by operation."""

    def __init__(self):
        self.numbers = {}

    def __enter__(self):
        self.kept = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}
        for name, function in self.kept.items():
            setattr(dist, name, functools.partial(self.call, name, function))
        return self

    def call(self, name, function, tensor, *args, **kwargs):
        self.numbers.setdefault(name, []).append(tensor.numel())
        return function(tensor, *args, **kwargs)

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)


def refused(work):
    """Return the message of the error that `work` raises."""
    with pytest.raises(xkfac.XkfacError) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


def failing():
    yield from images(1)
    raise xkfac.XkfacError("the disk is on fire")


def process(rank, ranks, folder):
    """Return the results of all that is tested of a number of processes."""
    results = dict(per_process(rank, ranks, folder))
    return results | dict(synchronised_ones(rank, ranks)) | dict(faults(rank, ranks))


def per_process(rank, ranks, folder):
    parallel = nn.parallel.DistributedDataParallel(everything())
    mine = images()[rank::ranks]
    for name in SHARED[ranks]:
        made = xkfac.estimate(parallel, mine, **drawn(name))
        yield name, (made.curvature, made.examples)
    yield "several sizes", xkfac.estimate(parallel, several_sizes()[rank::ranks], **drawn("pooled")).curvature
    alone = mine if rank == 1 else []
    yield "alone", xkfac.estimate(parallel, alone, draws=2).curvature
    yield "alone corrected", xkfac.estimate(parallel, iter(()) if rank != 1 else mine, kind="diagonal").curvature
    yield "max_batches", xkfac.estimate(parallel, images(), max_batches=1, draws=1).examples
    linear = nn.parallel.DistributedDataParallel(perceptron())
    for form in ("mean", "paper"):
        yield f"cross-layer {form}", xkfac.estimate(linear, whole()[rank::ranks], form=form, cross_layer=True).curvature
    own = whole()[rank::ranks]
    streamed = xkfac.estimate(linear, iter(own) if rank != 1 else own).curvature
    yield "streams", (streamed, xkfac.estimate(linear, own).curvature)
    with Counted() as counted:
        xkfac.estimate(linear, whole()[rank::ranks])
    yield "numbers", counted.numbers
    decomposed = []
    kept = assemble.eigenbasis
    assemble.eigenbasis = lambda *pair, empty: decomposed.extend([] if empty else [pair]) or kept(*pair, empty=empty)
    xkfac.estimate(linear, whole()[rank::ranks], kind="corrected")
    assemble.eigenbasis = kept
    yield "decomposed", len(decomposed)
    parallel.module.bn.running_mean.add_(rank)
    before = copy.deepcopy(parallel.module.state_dict())
    state = torch.get_rng_state()
    memory = xkfac.consolidate(parallel, mine, "xkfac", draws=2)
    memory.save(folder / f"memory-{rank}.safetensors")
    changed = {k for k, v in parallel.module.state_dict().items() if not torch.equal(v, before[k])}
    yield "trace", (changed, torch.equal(state, torch.get_rng_state()))


def synchronised_ones(rank, ranks):
    parallel = synchronised(everything())
    for name in SYNCHRONISED:
        yield f"synchronised {name}", xkfac.estimate(parallel, images()[rank::ranks], **drawn(name)).curvature
    norms = [module for module in parallel.modules() if isinstance(module, nn.SyncBatchNorm)]
    yield "still synchronised", norms and not any("forward" in vars(norm) for norm in norms)


def faults(rank, ranks):
    parallel = nn.parallel.DistributedDataParallel(everything())
    mine = images()[rank::ranks]
    yield "settings", refused(lambda: xkfac.estimate(parallel, mine, form="paper" if rank == 1 else "mean"))
    yield "none", refused(lambda: xkfac.estimate(parallel, []))
    yield "failed", refused(lambda: xkfac.estimate(parallel, failing() if rank == 1 else mine))
    pixels = [(nn.functional.pad(x, (0, 0, 0, 2 * (rank % 2))), y) for x, y in images(1)]
    yield "positions", refused(lambda: xkfac.estimate(parallel, pixels))
    broken = [(x * float("nan"), y) for x, y in mine] if rank == 1 else mine
    yield "not finite", refused(lambda: xkfac.estimate(parallel, broken))
    with torch.no_grad():
        parallel.module.head.weight.add_(rank)
    yield "weights", refused(lambda: xkfac.estimate(parallel, mine))
    own = nn.parallel.DistributedDataParallel(everything())
    own.broadcast_buffers = False
    own.module.bn.running_var.add_(rank)
    yield "buffers", refused(lambda: xkfac.estimate(own, mine))
