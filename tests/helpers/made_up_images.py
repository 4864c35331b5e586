"""Small trees of images that a network can learn to tell apart, as folders and as zip files, and runs with them."""

import importlib
import json
import os
import random
import signal
import traceback
import zipfile
from unittest import mock

import torch
from PIL import Image

from tests.helpers.small_runs import Disk, die
from xkfac.experiments.data import images
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import save_source
from xkfac.experiments.recipes.parsing import parse_recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.run_data import load_run_data
from xkfac.experiments.runs.worker import run_job
from xkfac.learning import calibrator

CLASSES = ("ant", "bee", "cat")


def picture(label, number, size=(12, 12), seed=0):
    """Bytes [height, width, 3]: a colour for the class, with noise of its own for each image."""
    width, height = size
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * label + number)
    colour = torch.tensor([(37 * label) % 128, (91 * label + 50) % 128, (11 * label + 90) % 128])
    return (colour + torch.randint(128, (height, width, 3), generator=generator)).to(torch.uint8)


def save(path, pixels):
    """Write bytes [height, width, 3] as an image; the ending of the path says of which kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width, _ = pixels.shape
    Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist())).save(path)


def make_tree(folder, classes=CLASSES, train=6, test=2, size=(12, 12), seed=0, ending=".png", test_name="test"):
    """Write a tree with `train` and `test` images per class, one number or one for each class; return its path."""
    for part, counts in (("train", train), (test_name, test)):
        for label, name in enumerate(classes):
            for number in range(counts if isinstance(counts, int) else counts[label]):
                at = number if part == "train" else 500 + number
                save(folder / part / name / f"{number:04d}{ending}", picture(label, at, size, seed))
    return folder


def zipped(folder, path, top=""):
    """Write all that is in a folder to a zip file, below the folders `top` in there; return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, f"{top}{file.relative_to(folder)}")
    return path


def load(path, **settings):
    """Load a tree of this module."""
    return images.load_pictures(path, **{"pixels": 12, "resize": "squash", "validation": 0.25, **settings})


def all_of(parts):
    return parts.train, parts.validation, parts.test


def same(a, b):
    """Whether two loads gave the same."""
    pairs = zip(all_of(a), all_of(b), strict=True)
    return a.classes == b.classes and all(torch.equal(p.x, q.x) and torch.equal(p.y, q.y) for p, q in pairs)


def decodings(monkeypatch):
    """Return a list to which every image that is decoded from now on is added."""
    seen = []
    whole = images.decoded
    monkeypatch.setattr(images, "decoded", lambda content, *rest: (seen.append(content), whole(content, *rest))[1])
    return seen


# Small runs of images

TEXT = """
name = "pictures"
repeats = 3
seed = 4
[images]
model = "timm:test_resnet"
weights = "source.safetensors"
pixels = 16
validation = 0.4
orders = [["birds", "cars"], ["cars", "birds"]]
[tasks.old]
tree = "old"
[tasks.birds]
tree = "birds"
resize = "crop"
[tasks.cars]
tree = "cars"
scale = [1.0, 1.0]
[defaults]
epochs = 2
batch = 5
lr = 0.02
lr_end = 1e-3
early_stopping = false
curvature = { draws = 1 }
batches = 2
[lines.xkfac]
[lines.balanced]
balance = true
balance_every = 2
[lines.fixed-bn]
method = "fixed-bn"
lr = 2e-3
[lines.calibrated]
calibrated = true
consolidate = "validation"
batches = 0
curvature = { grouping = "hierarchical" }
steady = true
implicit = true
interpretation = "eval"
head_epochs = 1
[lines.own-bn]
method = "own-bn"
own = ["conv1", "layer1*"]
calibrated = true
batches = 0
steady = true
implicit = true
head_epochs = 1
[lines.single]
method = "single"
"""
SEED = 4
SIZES = {"old": 5, "birds": 4, "cars": 3}


def recipe(*settings):
    """The recipe of small runs of images, changed by settings."""
    return parse_recipe(TEXT, "pictures", settings)


def make_data(folder, sizes=SIZES, model="timm:test_resnet"):
    """Write trees with so many classes and the weights of a source network for the first of them; return the folder."""
    for seed, (name, classes) in enumerate(sizes.items()):
        make_tree(folder / name, [f"{name}-{label}" for label in range(classes)], train=6, size=(20, 18), seed=seed)
    source, classes = next(iter(sizes.items()))
    save_source(source_network(model, {source: classes}), folder / "source.safetensors", source, {})
    return folder


def source_network(model, tasks):
    """A network whose BN have scales other than 0 and statistics of what they meet, unlike those of a new one."""
    network = make_backbone(model, tasks, seed=99)
    generator = torch.Generator().manual_seed(1)
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            for tensor, least in ((norm.weight, 0.7), (norm.bias, -0.2)):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) / 2 + least)
            norm.momentum = None  # the mean over all batches
        network.train()
        for _ in range(2):
            network(torch.randn(32, 3, 16, 16, generator=generator))
    for norm in norms:
        norm.momentum = 0.1
    return network.eval()


def short_calibrations():
    """Have calibrations take a few steps, for as long as this lasts: hundreds take long."""
    return mock.patch.object(calibrator, "LONGEST", 8)


def materials(made, data):
    """What jobs of a recipe are made of, on the CPU."""
    return load_run_data(made, data, torch.device("cpu"))


def make_run(path, data, made=None):
    """Return the folder of a new run of images that nothing has been done of yet."""
    return RunFolder.create(path, made or recipe(), {"place": "cpu", "data": str(data)})


def finish(run, *names, seeds=(SEED,)):
    """Learn jobs of a run in this process, networks of their own first, with checkpoints whenever that is possible."""
    loaded = materials(run.recipe, run.facts["data"])
    lines = {name: line for name, line in run.recipe.lines.items() if not names or name in names}
    with short_calibrations():
        for seed in seeds:
            for name in sorted(lines, key=lambda name: lines[name].method != "single"):
                run_job(run, name, seed, loaded, 0.0)
    return run


def kill_and_go_on(path, cache):
    """Learn all jobs of a run with the first seed, each in processes that die at operations on their files by chance.

    A process is forked for each life, from this one, which has brought in all that is imported late. Writes for each
    line how often it was killed.
    """
    importlib.import_module("tests.conftest")
    os.environ["XKFAC_CACHE"] = cache
    torch.set_num_threads(1)
    run, kills = RunFolder.open(path), {}
    loaded = materials(run.recipe, run.facts["data"])
    for name in sorted(run.recipe.lines, key=lambda name: run.recipe.lines[name].method != "single"):
        moments, kills[name] = random.Random(name), 0
        while not run.job(name, SEED).result().done:
            kills[name] += _dies(run, name, loaded, moments.randint(1, 45))
            assert kills[name] < 60
    (path.parent / "kills.json").write_text(json.dumps(kills))


def _dies(run, name, loaded, at):
    child = os.fork()
    if child == 0:
        try:
            with short_calibrations(), Disk(run.path, at, die).faulty():
                run_job(run, name, SEED, loaded, 0.0)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code != 0
