"""Recipes of images through the command: what cannot be run is said before it begins, what can be is run to its end."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision import models, transforms

from tests.helpers import made_up_images as small
from tests.helpers.small_runs import assert_same, weights
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.networks.weights import load_source
from xkfac.experiments.recipes.parsing import load_recipe
from xkfac.experiments.report import page
from xkfac.experiments.runs.folder import RunFolder

TINY = "timm:test_resnet"  # four blocks, so that what is proved is the recipe and not a large network's speed
DOCUMENT = Path(__file__).parents[3] / "docs" / "fine-grained.md"
# torchvision's compiled operators do not load beside a CPU build of torch; its models do not need them.
DECLARATIONS = """
import torch
if torch.version.cuda is None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("XKFAC_DATA", raising=False)


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Have processes that run jobs import torchvision, and leave out reports, which take seconds."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DECLARATIONS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(page, "write_report", lambda runs, to: (to / "report.html", []))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return small.make_data(tmp_path_factory.mktemp("deep") / "data")


@pytest.fixture
def data(made, tmp_path):
    """A data folder that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "data"))


# What cannot be run


def no_pictures(data):
    for path in (data / "birds/train/birds-2").iterdir():
        path.unlink()


def unreadable(data):
    (data / "cars/test/cars-1/0001.png").write_bytes(b"\x89PNG and no more")


def not_in_test(data):
    shutil.rmtree(data / "birds/test/birds-3")


def more_classes(data):
    small.make_tree(data / "old", ["old-x"], train=6)


def another_architecture(data):
    small.save_source(small.make_backbone("resnet18", {"old": 5}, seed=0), data / "source.safetensors", "old", {})


def no_weights(data):
    (data / "source.safetensors").write_text("not weights at all")


def missing_weights(data):
    (data / "source.safetensors").rename(data / "sources.safetensors")


def missing_tree(data):
    (data / "cars").rename(data / "cats")


def nothing(data):
    """Leave the data as it is: the recipe is wrong."""


WRONG = [
    (no_pictures, [], ["class 'birds-2'", "has no images in 'train'"]),
    (unreadable, [], ["'test/cars-1/0001.png'", "cannot be read as an image"]),
    (not_in_test, [], ["class 'birds-3'", "is in 'train' but not in 'test'"]),
    (more_classes, [], ["has a classifier of 5 classes, and task 'old' has 6"]),
    (another_architecture, [], ["source.safetensors' is not of 'timm:test_resnet'", "name matching weights or model"]),
    (no_weights, [], ["source.safetensors' is no weights file"]),
    (missing_weights, [], ["source.safetensors' does not exist"]),
    (missing_tree, [], ["no images 'cars'", "did you mean 'cats'?"]),
    (nothing, ["lines.fixed-bn.batch=13"], ["lines.fixed-bn: batch is 13", "task 'cars' has 12 training images"]),
    (nothing, ["images.model=timm:test_resnt"], ["model 'timm:test_resnt' is not known", "timm:test_resnet"]),
    (nothing, ["images.model=resnet51"], ["model 'resnet51' is not known", "did you mean 'resnet50'"]),
    (nothing, ['images.orders=[["cars", "cars"]]'], ["must name each target once", "(cars)", "is cars, cars"]),
    (
        nothing,
        ['images.orders=[["cars", "birds"], ["cars"]]'],
        ["all orders the same targets (birds, cars)", "is cars"],
    ),
    (nothing, ['images.orders=[["cars", "brids"]]'], ["names 'brids', which is no target; they are birds, cars"]),
    (nothing, ["images.orders=[[]]"], ["must name each target once", "(birds, cars)"]),
    (nothing, ["lines.calibrated.batch=6"], ["lines.calibrated: a calibration needs two batches", "gives one, of 10"]),
    (nothing, ["lines.calibrated.batches=1"], ["lines.calibrated: a calibration needs two batches"]),
    (nothing, ["images.validation=0.0"], ["lines.calibrated: consolidate needs a validation split"]),
    (nothing, ["tasks.birds.scale=[0.5, 0.1]"], ["tasks.birds: scale must be two growing numbers"]),
    (
        nothing,
        ['lines.own-bn.own=["conv1", "layr1"]'],
        ["lines.own-bn: no shared layer with parameters matches 'layr1'"],
    ),
    (nothing, ["images.stem=small"], ["was trained with the stem 'standard'"]),
]


@pytest.mark.parametrize(
    ("spoil", "settings", "parts"), WRONG, ids=[f"{spoil.__name__}{''.join(more)}" for spoil, more, _ in WRONG]
)
@pytest.mark.parametrize("command", ["run", "tune"])
def test_what_cannot_be_run_is_one_sentence_before_anything_is_written(
    xkfac, data, tmp_path, command, spoil, settings, parts
):
    spoil(data)
    recipe, folder = tmp_path / "pictures.toml", tmp_path / "runs" / "run"
    recipe.write_text(small.TEXT)
    options = [word for setting in settings for word in ("-s", setting)]
    code, out, err = xkfac(command, recipe, "-o", folder, "--data", data, "--device", "cpu", *options)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert not folder.parent.exists()


def test_a_wrong_model_and_wrong_weights_are_found_before_images_are_decoded(xkfac, data, tmp_path, monkeypatch):
    seen = small.decodings(monkeypatch)
    recipe = tmp_path / "pictures.toml"
    recipe.write_text(small.TEXT)
    for setting in ("images.model=resnet51", "images.weights=none.safetensors", 'lines.own-bn.own=["layr1"]'):
        assert xkfac("run", recipe, "-o", tmp_path / "run", "--data", data, "-s", setting)[0] == 2
    assert seen == []


def test_without_a_data_folder_the_command_says_how_to_name_one(xkfac, data, tmp_path):
    recipe = tmp_path / "pictures.toml"
    recipe.write_text(small.TEXT)
    code, _, err = xkfac("run", recipe, "-o", tmp_path / "run")
    assert code == 2
    assert "the images 'old' need a folder" in err
    trees = [word for name in small.SIZES for word in ("-s", f"tasks.{name}.tree={data / name}")]
    code, _, err = xkfac("run", recipe, "-o", tmp_path / "run", *trees)
    assert code == 2
    assert "the weights 'source.safetensors' need a folder" in err
    assert not (tmp_path / "run").exists()


# The paper's experiment at full scale


def test_imagenet_to_fine_grained_is_the_paper_s_experiment():
    made = load_recipe("imagenet-to-fine-grained")
    assert (made.images.model, made.images.stem, made.images.pixels) == ("resnet50", "standard", 224)
    assert sorted(made.images.orders) == sorted(itertools.permutations(("birds", "cars", "flowers")))
    assert len({made.order(seed) for seed in made.seeds}) == 6
    assert list(made.tasks) == ["imagenet", "birds", "cars", "flowers"]
    rates, dampings = (0.1, 0.05, 0.02, 0.01), (1e-4, 5e-5, 2e-5, 1e-5)
    table = {
        "fixed-bn": (rates_of_fixed_bn := (0.02, 0.01, 0.005, 0.002), False),
        "fixed-bn-alpha": (rates_of_fixed_bn, True),
        **{"kfac": (rates, False), "kfac-alpha": (rates, True), "xkfac": (rates, False), "xkfac-alpha": (rates, True)},
    }
    assert set(made.lines) == {"single", *table}
    for name, line in made.lines.items():
        assert (line.epochs, line.batch, line.momentum, line.lr_end) == (100, 32, 0.9, 1e-4)
        assert (line.learning_rate(1, 0), line.learning_rate(1, 99)) == (line.lr, pytest.approx(1e-4))
        assert (line.tasks, line.early_stopping, line.strength, line.calibrated) == (4, False, 1.0, False)
        if name == "single":
            assert (line.method, dict(line.grid)) == ("single", {"lr": list(rates)})
            continue
        method = line.resolved_method()
        assert (tuple(line.grid["lr"]), line.balance) == table[name]
        assert tuple(line.grid["damping"]) == dampings
        assert line.balance_every == 10
        assert method.fixed_bn == name.startswith("fixed-bn")
        assert name.startswith("fixed-bn") or (method.interpretation, method.recentre) == ("brn", True)
        assert method.name == name.removesuffix("-alpha")
    assert made.lines["xkfac"].resolved_method().settings.form == "paper"


@pytest.mark.parametrize(
    ("task", "stored", "cropped"), [("birds", 224, False), ("cars", 224, False), ("flowers", 256, True)]
)
def test_images_are_prepared_as_packnet_prepares_them(tmp_path, task, stored, cropped):
    """Birds and cars are squashed to 224 x 224 and mirrored; flowers are resized to 256 and cropped at random."""
    made = load_recipe("imagenet-to-fine-grained")
    settings = made.tasks[task]
    tree = small.make_tree(tmp_path / "tree", ["a", "b"], train=2, test=1, size=(330, 240))
    parts = small.images.load_pictures(tree, pixels=224, resize=settings.resize, validation=0.0)
    file = Image.open(tree / "train" / "a" / "0000.png")
    steps = [transforms.Resize(256), transforms.CenterCrop(256)] if cropped else [transforms.Resize((224, 224))]
    expected = transforms.Compose([*steps, transforms.PILToTensor()])(file)
    assert parts.train.x.shape[1:] == (3, stored, stored)
    assert torch.equal(parts.train.x[0], expected)
    augmentation = Augmentation(224, settings.scale, flip=settings.flip)
    draws = augmentation.draw((2000,), torch.Generator().manual_seed(0))
    area, mirrored = draws[:, 2] * draws[:, 3], draws[:, 4] < 0
    assert 0.45 < mirrored.double().mean() < 0.55
    assert torch.equal(area, torch.ones(2000)) != cropped
    if cropped:
        assert 0.08 <= area.min() < 0.1
        assert 0.9 < area.max() <= 1
    centre = transforms.Compose([transforms.CenterCrop(224), transforms.ConvertImageDtype(torch.float32)])(expected)
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(augmentation.plain(parts.train.x[:1])[0], normalise(centre), rtol=1e-5, atol=1e-5)


def test_imagenet_to_fine_grained_runs_to_its_end(xkfac, workers, tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    for seed, name in enumerate(("imagenet", "cub_cropped", "cars_cropped", "flowers")):
        part = "val" if name == "imagenet" else "test"
        small.make_tree(data / name, ["a", "b"], train=3, test=1, size=(40, 36), seed=seed, test_name=part)
    small.save_source(small.make_backbone(TINY, {"imagenet": 2}, seed=9), data / "own.safetensors", "imagenet", {})
    settings = {
        "repeats": 1,
        "images.model": TINY,
        "images.weights": "own.safetensors",
        "images.pixels": 32,
        "defaults.epochs": 2,
        "defaults.batch": 4,
        "defaults.batches": 1,
        "defaults.tasks": 2,
        "lines.single.grid": "{ lr = [0.01] }",
        "lines.xkfac-alpha.grid": "{ lr = [1e-6, 1e-7], damping = [1e-4] }",
        "lines.xkfac-alpha.curvature": "{ draws = 1 }",
    }
    options = [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    code, _, err = xkfac(
        *("tune", "imagenet-to-fine-grained", "-o", folder, "--data", data, "--device", "cpu", "-j", 1, "-q"),
        *("--line", "xkfac-alpha", "--line", "single", *options),
    )
    assert code == 0, err
    choices = {each["line"]: each for each in json.loads((folder / "choices.json").read_text())}
    assert choices.keys() == {"single", "xkfac-alpha"}
    assert {each["task"] for each in choices.values()} == {"birds"}
    assert choices["xkfac-alpha"]["trials"] == 2
    assert choices["xkfac-alpha"]["lr"] in (1e-6, 1e-7)
    run = RunFolder.open(folder)
    for name in choices:
        result = run.job(name, 0).result()
        assert (result.done, result.diverged, result.tasks) == (True, None, ["imagenet", "birds"])
        assert [len(row) for row in result.accuracy] == [1, 2]
    first, second = run.job("xkfac-alpha", 0).result().epochs
    assert 0 <= 10 * first["penalty"] < second["penalty"]  # the first step begins where the penalty is zero
    assert run.facts["classes"] == {"imagenet": 2, "birds": 2, "cars": 2, "flowers": 2}


def test_weights_of_the_library_are_taken_by_name(xkfac, data, tmp_path, monkeypatch):
    asked = []

    def get_model(name, **options):
        asked.append(options.get("weights"))
        return whole(name)

    whole = models.get_model
    monkeypatch.setattr(models, "get_model", get_model)
    net = small.make_backbone("resnet18", {"old": 1000}, seed=0)
    for weights_name, expected in (("download", "DEFAULT"), ("download:IMAGENET1K_V1", "IMAGENET1K_V1")):
        load_source(net, weights_name, "old")
        assert asked[-1] == expected
    recipe = tmp_path / "pictures.toml"
    recipe.write_text(small.TEXT)
    for model, name, part in (
        ("resnet50", "IMAGENET1K_V3", "did you mean 'IMAGENET1K_V2'?); name one of IMAGENET1K_V1, IMAGENET1K_V2"),
        ("timm:test_resnet", "r160_in1k", "in that of the model: 'timm:test_resnet.r160_in1k'"),
    ):
        settings = ("-s", f"images.model={model}", "-s", f"images.weights=download:{name}")
        code, _, err = xkfac("run", recipe, "-o", tmp_path / "run", "--data", data, *settings)
        assert code == 2
        assert part in err


# A sequence of one's own


def test_the_sequence_that_the_documentation_shows_runs_as_it_stands(xkfac, workers, tmp_path, monkeypatch):
    """Its commands too; settings beside them make a small network see few small images.

    Jobs in processes of their own, side by side, give the numbers of jobs one after the other.
    """
    text = DOCUMENT.read_text().partition("## Your own sequence")[2]
    (recipe,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```\n(xkfac.*?)```", text, re.DOTALL)
    assert len(recipe.splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(recipe)
    small.make_tree(Path("FOLDER/plants"), ["fern", "moss", "oak"], seed=1, size=(30, 40))
    mushrooms = small.make_tree(tmp_path / "elsewhere", ["cep", "morel"], seed=2, size=(40, 30), test_name="val")
    small.zipped(mushrooms, Path("FOLDER/mushrooms.zip"))
    pretrain, run = commands.strip().splitlines()
    little = {
        pretrain: [f"model={TINY}", "pixels=32", "epochs=2", "batch=6"],
        run: [
            f"images.model={TINY}",
            "images.pixels=32",
            "defaults.epochs=2",
            "defaults.batch=5",
            "defaults.batches=1",
        ],
    }
    for command, settings in little.items():
        options = [word for setting in settings for word in ("-s", setting)]
        jobs = ["-j", 2] if command == run else []
        code, _, err = xkfac(*command.split()[1:], "--device", "cpu", "-q", *jobs, *options)
        assert code == 0, err
    found = RunFolder.open(Path("runs/mine"))
    assert list(found.recipe.tasks) == ["plants", "mushrooms"]
    assert found.facts["classes"] == {"plants": 3, "mushrooms": 2}
    alone = small.finish(small.make_run(tmp_path / "alone", "FOLDER", found.recipe), seeds=(0,))
    file = load_file("FOLDER/plants.safetensors")
    for name in ("xkfac", "fine-tuning"):
        assert_same(found.job(name, 0), alone.job(name, 0))
        result = found.job(name, 0).result()
        assert (result.done, result.diverged, result.tasks) == (True, None, ["plants", "mushrooms"])
        assert [len(row) for row in result.accuracy] == [1, 2]
        state = weights(found.job(name, 0))
        assert torch.equal(state["model/heads.plants.weight"], file["fc.weight"])
        assert state["model/heads.mushrooms.weight"].shape[0] == 2
        assert not torch.equal(state["model/trunk.layer4.0.conv1.weight"], file["layer4.0.conv1.weight"])
