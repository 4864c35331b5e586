"""Recipes: small TOML files that say what an experiment runs, line by line.

    name = "mine"
    [data]
    set = "digits"
    [defaults]                  # of every line
    tasks = 5
    [lines.xkfac]               # one curve of a figure
    label = "XK-FAC"
    [lines.fine-tuning]
    method = "fine-tuning"

Every key is explained at the field of its class: `Recipe`, `Data`, `Images`, `Task`, `Line`, `Figure`.
"""

import fnmatch
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from xkfac.errors import nearest
from xkfac.experiments.recipes.toml_tables import Count, RecipeError, Share, number, whole, write_key, write_value
from xkfac.methods import METHODS, Method, get_method
from xkfac.plain_values import Amount, Positive, Range

DataSet = Literal["mnist", "digits"]
Norm = Literal["bn", "brn", "none"]
Resize = Literal["squash", "crop"]
JOINT = "joint"
SINGLE = "single"
UNPROTECTED = (JOINT, SINGLE)
if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[(*METHODS, *UNPROTECTED)]
SWEPT = ("strength", "lr")

_READING = ("interpretation", "recentre")
_OF_STATISTICS = ("fixed_bn", "interpretation", "bn_momentum")
_PENALISED_ONLY = (
    *("damping", "strength", "penalty_every", "calibrated", "steady", "implicit", "lr_by_share", "head_epochs"),
    *("bn_momentum", "balance", "balance_every", "curvature", "consolidate", "batches", "keep"),
    *_READING,
)
_PERCEPTRON_ONLY = ("norm", "activation", "widths", "at")
Momentum = Annotated[float, Range("above 0 and at most 1", lambda value: 0 < value <= 1)]
Widths = Annotated[
    tuple[int, ...],
    Range(
        "up to 100 numbers, each at least 1 and at most 65,536",
        lambda values: len(values) <= 100 and all(1 <= value <= 65_536 for value in values),
    ),
]
Scale = Annotated[
    tuple[float, ...],
    Range("two growing numbers above 0 and up to 1", lambda of: len(of) == 2 and 0 < of[0] <= of[1] <= 1),
]
Grid = Mapping[str, Annotated[list[Amount], Range("a list of at least one value to choose from", bool)]]
SweepPoint = Annotated[
    Mapping[str, str],
    Range(
        f"the line, label and key of a sweep, the key one of {', '.join(SWEPT)}",
        lambda of: not of or (of.keys() == {"line", "label", "key"} and of["key"] in SWEPT),
    ),
]


@dataclass(frozen=True)
class Data:
    """The data of an experiment.

    set: `mnist`, read from the data folder, or `digits`, which scikit-learn ships. validation: examples that are split
    off the training part, for early stopping and for choices on the target alone. train: at most so many training
    examples, 0 for all. measure: the part that accuracies are measured on, `test`, or `validation` for a recipe that
    helps to choose something, which test examples must not.
    """

    set: DataSet = "mnist"
    validation: Count = 5000
    train: Count = 0
    measure: Literal["test", "validation"] = "test"


@dataclass(frozen=True)
class Task:
    """A task of images: a tree `train/CLASS/IMAGE`, `test/CLASS/IMAGE`, as a folder or a zip in the data folder.

    resize: `squash` an image into a square, or `crop` the square in its middle, with a border that evaluation leaves
    out. scale: the range of the area of a random crop while training, [1, 1] for none. flip: mirror at random.
    limit: at most so many training images, 0 for all.
    """

    tree: str
    resize: Resize = "squash"
    scale: Scale = (0.08, 1.0)
    flip: bool = True
    limit: Count = 0


@dataclass(frozen=True)
class Images:
    """The network and the data of an experiment with images; the first task is the source, which it knows already.

    model: a torchvision model, or `timm:NAME`. stem: `small` leaves out the max-pool of a ResNet, for small images.
    weights: a file with the source network, in the data folder, or `download` for the library's latest own, or
    `download:NAME` for those of a name, such as IMAGENET1K_V1.
    pixels: the side of the network's input. validation: the share that is split off each training part.
    orders: the targets in the orders they are learnt; repeat r takes order r modulo their number. Empty: as listed.
    Targets that no order names are left out.
    measure: the part that accuracies are measured on.
    infer_tasks: measure `xkfac.Router` for every line and by all kinds of features, not only for lines whose tasks
    have layers of their own and by features of the source network.
    """

    model: str = "resnet50"
    stem: Literal["standard", "small"] = "standard"
    weights: str = "download"
    pixels: Annotated[int, whole(1, 8192)] = 224
    validation: Share = 0.1
    orders: tuple[tuple[str, ...], ...] = ()
    measure: Literal["test", "validation"] = "test"
    infer_tasks: bool = False


@dataclass(frozen=True)
class Line:
    """One curve of a figure: a network, how it is trained, and what protects it.

    label, note: what figures and tables call it, and what it is. tasks: how many are learnt, one after the other.
    norm: `bn`, `brn` or `none` before each `activation`, `relu` or `gelu`. widths: units of the hidden layers.
    epochs, batch, lr, momentum: SGD; the learning rate is divided by `lr_factor` every `lr_every` epochs, or falls to
    `lr_end` along a half cosine where that is given. label_smoothing: that of the loss.
    target_lr: the learning rate from the second task on, where it is another; at 0 BN's statistics alone move.
    lr_by_share: multiply the learning rate of a target by (T+1)/2 where T tasks are known: its loss has the share
    1/(T+1) of the objective, and each target is then learnt with steps as long as those of the first.
    early_stopping: keep the epoch that is best on the validation split of the current target.
    average: the epochs at the end whose weights are averaged, 0 for the last weights alone.
    method: one of `xkfac.METHODS`; or `joint`, which trains on all tasks at once, for each number of tasks in `at`; or
    `single`, which trains a network of its own for each task.
    own: layers that each task has of its own, by patterns of their paths; `method` says whether BN is too. The task
    of a permuted image is then inferred from the image (`xkfac.Router`).
    interpretation, recentre: the method's own unless given. fixed_bn: every BN stays as the first task left it.
    damping, strength, penalty_every: those of `xkfac.Learner`. calibrated: multiply the strength by the scale that
    calibration on held-out examples of the first task found. steady: take no learning rate above half of what is stable
    along the penalty's stiffest direction, for the parameters that it protects. implicit: take the stiff part of the
    penalty implicitly, which allows for longer steps. head_epochs: the first epochs of a task, in which the parameters
    that are protected stand still and the new head alone learns. bn_momentum: how fast BN's running statistics follow
    while a task is learnt under a penalty, BN's own rate unless given; strong penalties see their noise, and need it
    slow.
    balance: adaptive alpha_s and alpha_t, updated every `balance_every` steps; C_t is the training loss at the end of
    the line whose method is `single`.
    curvature: changes to the method's `xkfac.Settings`, such as {form = "paper", draws = 1}.
    consolidate: the part of a task that its curvature is estimated on, `train` or `validation`; batches: at most so
    many batches of it, 0 for all. keep: `average` the factors over tasks, or keep `all` terms.
    grid: values of `lr` and `damping` that `xkfac tune` chooses from for each task, on its validation split.
    sweep: strengths, or { lr = [...] }, that the line is run at, each as a line of its own (see `sweeps.py`).
    Such a line says here what it is a point of.
    """

    label: str = ""
    note: str = ""
    tasks: Annotated[int, whole(1, 10_000)] = 10
    norm: Norm = "bn"
    activation: Literal["relu", "gelu"] = "relu"
    widths: Widths = (128, 128)
    epochs: Annotated[int, whole(1, 1_000_000)] = 15
    batch: Annotated[int, whole(2)] = 128
    lr: Amount = 0.1
    target_lr: Amount | None = None
    lr_by_share: bool = False
    lr_every: Positive = 5
    lr_factor: Annotated[float, number(1)] = 10.0
    lr_end: Amount | None = None
    momentum: Share = 0.9
    early_stopping: bool = True
    average: Count = 0
    label_smoothing: Share = 0.0
    method: MethodName = "xkfac"
    at: tuple[int, ...] = ()
    own: tuple[str, ...] = ()
    interpretation: str | None = None
    recentre: bool | None = None
    fixed_bn: bool = False
    damping: Amount = 1e-4
    strength: Amount = 1.0
    penalty_every: Positive = 1
    calibrated: bool = False
    steady: bool = False
    implicit: bool = False
    head_epochs: Count = 0
    bn_momentum: Momentum | None = None
    balance: bool = False
    balance_every: Positive = 10
    curvature: Mapping[str, Any] = field(default_factory=dict)
    consolidate: Literal["train", "validation"] = "train"
    batches: Count = 0
    keep: Literal["average", "all"] = "average"
    grid: Grid = field(default_factory=dict)
    sweep: SweepPoint = field(default_factory=dict)

    @property
    def swept(self) -> float | None:
        """The value that sets the line apart from others of its sweep; None where it is in none."""
        return getattr(self, self.sweep["key"]) if self.sweep else None

    @property
    def penalised(self) -> bool:
        """Whether the line has a penalty at all."""
        return self.resolved_method().penalised

    @property
    def protected(self) -> bool:
        """Whether the line learns with a memory."""
        return self.penalised or self.resolved_method().fixed_bn

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tasks are known after each stage of a job."""
        if self.method == JOINT:
            return self.at or (self.tasks,)
        return tuple(range(1, self.tasks + 1))

    def learning_rate(self, task: int, epoch: int) -> float:
        """Return the learning rate of an epoch of a task, both counted from 0."""
        first = self.lr if task == 0 or self.target_lr is None else self.target_lr
        if self.lr_by_share and task > 0:
            first *= (task + 1) / 2
        if self.lr_end is not None:
            share = (1 + math.cos(math.pi * epoch / max(self.epochs - 1, 1))) / 2
            return self.lr_end + (first - self.lr_end) * share
        try:
            return float(first / self.lr_factor ** (epoch // self.lr_every))
        except OverflowError:
            return 0.0

    def resolved_method(self) -> Method:
        """Return the library's method of the line; one that protects nothing is fine-tuning to it."""
        if self.method in UNPROTECTED:
            return METHODS["fine-tuning"]
        options = {"interpretation": self.interpretation, "recentre": self.recentre}
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        if self.fixed_bn:
            given = {"interpretation": "eval", "recentre": False, **given, "fixed_bn": True}
        return get_method(self.method, **self.curvature, **given)


@dataclass(frozen=True)
class Plan:
    """What a job has to do: how many tasks are known after each of its stages, and the most epochs of a stage.

    count: how many tasks there are. tasks: their names in their order, where the recipe gives them.
    """

    counts: tuple[int, ...]
    epochs: int
    count: int
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A figure: average accuracy against the number of tasks for some lines."""

    title: str = ""
    note: str = ""
    lines: tuple[str, ...] = ()


TABLES = ("data", "images", "tasks", "lines", "figures")  # of a recipe; its other fields are plain keys


@dataclass(frozen=True)
class Recipe:
    """An experiment: its data, its lines, how often each is repeated, and the figures that show them.

    It has either `data`, whose permutations are the tasks of a perceptron, or `images` and their `tasks`. The repeats
    have the seeds seed, seed + 1, ...; a seed fixes permutations, initial weights, batches and label draws.
    threads: CPU threads of one job; part of the recipe because sums over more threads round differently.
    precision: that of products on a GPU: `float32`, `tf32`, or `bfloat16` in the network and for the penalty's
        factors.
    """

    name: str
    lines: Mapping[str, Line]
    title: str = ""
    description: str = ""
    data: Data = field(default_factory=Data)
    repeats: Annotated[int, whole(1, 10_000)] = 1
    seed: Annotated[int, whole(0, 2**53)] = 0
    # Far beyond this many the system starts no more threads, and whatever needs one first is blamed.
    threads: Annotated[int, whole(1, 1024)] = 1
    figures: Mapping[str, Figure] = field(default_factory=dict)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    images: Images | None = None
    tasks: Mapping[str, Task] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """The seeds of the repeats."""
        return range(self.seed, self.seed + self.repeats)

    @property
    def world(self) -> tuple[str, Data | Images]:
        """The table that says what is learnt from, by its name, `data` or `images`."""
        return ("data", self.data) if self.images is None else ("images", self.images)

    def order(self, seed: int) -> tuple[str, ...]:
        """Return the names of the tasks of images in the order in which the repeat of a seed meets them."""
        assert self.images is not None
        source, *targets = self.tasks
        orders = self.images.orders or (tuple(targets),)
        return (source, *orders[(seed - self.seed) % len(orders)])

    def plan(self, name: str, seed: int) -> Plan:
        """Return what the job of a line with a seed has to do."""
        line = self.lines[name]
        tasks = () if self.images is None else self.order(seed)[: line.tasks]
        return Plan(line.counts, line.epochs, line.tasks, tasks)

    def only(self, patterns: Sequence[str]) -> Self:
        """Return the recipe with those of its lines alone whose names match a pattern such as `kfac-*`.

        The name of a sweep stands for all of its lines.
        """
        chosen: dict[str, Line] = {}
        for pattern in patterns:
            hits = {
                name: line
                for name, line in self.lines.items()
                if any(fnmatch.fnmatchcase(each, pattern) for each in (name, line.sweep.get("line", name)))
            }
            if not hits:
                raise RecipeError(
                    f"no line of recipe '{self.name}' matches '{pattern}'{nearest(pattern, self.lines)}; "
                    f"its lines are {', '.join(self.lines)}"
                )
            chosen |= hits
        lines = {name: line for name, line in self.lines.items() if name in chosen}
        balanced = next((name for name, line in lines.items() if line.balance), None)
        singles = [name for name, line in self.lines.items() if line.method == SINGLE]
        if balanced is not None and not any(name in lines for name in singles):
            raise RecipeError(f"line '{balanced}' balances its losses by those of '{singles[0]}'; name that line too")
        figures = {
            key: replace(figure, lines=tuple(name for name in figure.lines if name in lines))
            for key, figure in self.figures.items()
        }
        return replace(self, lines=lines, figures={key: figure for key, figure in figures.items() if figure.lines})

    def to_toml(self) -> str:
        """Return the recipe with every key written out, as a run keeps it."""
        tables: dict[str, Any] = dict([self.world])
        for key in ("tasks", "lines", "figures"):
            tables |= {f"{key}.{write_key(name)}": table for name, table in getattr(self, key).items()}
        rows = self._rows(self)
        for name, table in tables.items():
            rows += ["", f"[{name}]", *self._rows(table)]
        return "\n".join(rows) + "\n"

    def _rows(self, table: Any) -> list[str]:
        """Return the keys of the recipe itself, or of a table of it, that have a value and an effect."""
        left_out: Container[str] = TABLES if table is self else ()
        if isinstance(table, Line):
            left_out = without_effect(vars(table), self.images is not None)
        values = {f.name: getattr(table, f.name) for f in fields(table) if f.name not in left_out}
        return [f"{key} = {write_value(value)}" for key, value in values.items() if value is not None]


def method_of(line: Mapping[str, Any]) -> Method | None:
    """Return the library's method of a line as it is written; None where it names none, which is said elsewhere."""
    method = line.get("method", Line.method)
    return METHODS.get("fine-tuning" if method in UNPROTECTED else method) if isinstance(method, str) else None


def without_effect(line: Mapping[str, Any], images: bool = False) -> dict[str, str]:
    """Return the keys that would do nothing on a line, each with what it is that they would not act on."""
    method, chosen = line.get("method", Line.method), method_of(line)
    if chosen is None:
        return {}
    of = f"method '{method}', which"
    rules: list[tuple[bool, tuple[str, ...], str]] = [
        (method != JOINT, ("at",), f"method '{method}', only on '{JOINT}'"),
        (images, _PERCEPTRON_ONLY, "a network for images, which [images] names"),
        (not images and not line.get("own"), ("head_epochs",), "tasks that share one head"),
        (not images and line.get("norm") == "none", ("fixed_bn", *_READING), "a network without BN"),
        (line.get("lr_end") is not None, ("lr_every", "lr_factor"), "a learning rate that falls to lr_end"),
        (not line.get("balance", False), ("balance_every",), "a line whose losses are not balanced"),
        (chosen.per_parameter, _READING, f"{of} penalises every parameter by itself"),
        (line.get("fixed_bn") is True, _READING, "a line whose fixed_bn keeps BN as it is"),
        (chosen.fixed_bn, ("fixed_bn", *_READING), f"{of} keeps BN as it is"),
        (chosen.fixed_affine, ("fixed_bn", "recentre"), f"{of} keeps gamma and beta as they are"),
        (chosen.fixed_statistics, _OF_STATISTICS, f"{of} keeps BN's statistics as they are"),
        (chosen.own_bn, ("fixed_bn", *_READING), f"{of} leaves BN to each task"),
        (not chosen.penalised, _PENALISED_ONLY, f"{of} has no penalty"),
        (method in UNPROTECTED, ("fixed_bn", "target_lr", "own"), f"{of} has no second task"),
    ]
    return {key: why for holds, keys, why in rules if holds for key in keys}
