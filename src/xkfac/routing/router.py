"""A network with task-specific layers that infers the task of its inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from xkfac import files
from xkfac.errors import MismatchError, NotFiniteError, XkfacError
from xkfac.model.batches import inputs_of, labels_of
from xkfac.model.passes import Progress, batches, device_of, norms_of, untouched, unwrap
from xkfac.routing.density import Densities, Moments, fit
from xkfac.routing.probe import Probe, last_features, make_probe, plain
from xkfac.task_layers import TaskLayer, task_layers_of, using_task

By = Literal["early", "last", "source"]
Using = Callable[[Any, str], AbstractContextManager[None]]
FORMAT = "xkfac-router"
# Early features are many and noisy: their covariances are shrunk, and beside last features they count for less.
RANK = {"early": 64, "last": 32}
VECTOR_RANK = 16  # for early features of vectors, which are not in cells: 50 tasks would cost more than a small network
SHRINKAGE = {"early": 0.7, "last": 0.0}
EARLY_WEIGHT = 0.25
QUANTILES = 101  # of a task's own log densities: they say how unusual an image is
HELD_OUT = 5  # one image out of so many measures these, and the temperature, instead of the density
MOST_HELD_OUT = 4096
DENSITY = tuple(field.name for field in fields(Densities))
PER_TASK = ("quantiles", "temperatures", "classes")
STATISTICS = (*(f"{part}_{name}" for part in RANK for name in ("unit", *DENSITY)), *PER_TASK)


@dataclass(frozen=True)
class Routed:
    """What a router answers for N examples.

    outputs: those of each example's likeliest task [N, ...]; where heads have different numbers of classes, those of
    smaller heads are padded with -inf. tasks: places in `Router.tasks` [N], -1 for unknown. probabilities: [N, T].
    """

    outputs: Tensor
    tasks: Tensor
    probabilities: Tensor


class Router(nn.Module):
    """A model with task-specific layers, and statistics of each task by which the task of an input is inferred.

    by: the features that statistics are kept of. "early": means and log variances of the channels of the input and of
    what the first BN layer gets, in cells of a coarse grid, from a frozen copy of the layers in front of it.
    "last": these, and the input of the head with the layers of the first task. "source": the same, from a frozen copy
    of the network as it is at the first task.
    using: a context manager in which a model answers for a task, for models that choose their heads themselves.
    tasks: those that are known, in their order.

    The prior probability of a task is its share of all classes: each class is as likely as any other.
    """

    quantiles: Tensor
    temperatures: Tensor
    classes: Tensor

    def __init__(self, model: nn.Module, by: By = "early", *, using: Using = using_task) -> None:
        super().__init__()
        if by not in get_args(By):
            raise XkfacError(f"by is '{by}'; it must be 'early', 'last' or 'source'")
        self.model, self.by, self.using = model, by, using
        self.tasks: list[str] = []
        self.probe: Probe | None = None
        self.source: _Fixed | None = None
        for name in STATISTICS:
            self.register_buffer(name, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Convert model and copies as asked; statistics go to the device alone, since rounded ones would mislead."""
        kept = {name: one for name in STATISTICS if (one := getattr(self, name)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, one in kept.items():
            setattr(self, name, one.to(getattr(self, name).device))
        return self

    @property
    def active_task(self) -> str:
        """The task whose layers are active in the model.

        Raises XkfacError for a model without task-specific layers.
        """
        for one in (self.model, *task_layers_of(self.model).values()):
            if isinstance(getattr(one, "active", None), str):
                return str(one.active)
        raise XkfacError("the model has no task-specific layers; make them by give_task_norms or give_task_layers")

    def add_task(
        self, task: str, loader: Iterable[Any], *, max_batches: int | None = None, progress: Progress = False
    ) -> None:
        """Keep the statistics of a task, from batches of its training images without augmentation.

        Labels, where batches have them, say how many classes the task has. What was known of the task is replaced.

        Raises XkfacError for a task that the model has no layers for, for fewer than 3 examples, and for inputs that
        are not one tensor, or not finite.
        """
        with self.using(self.model, task):
            pass  # refuses a task without layers before anything is changed
        first = self.tasks[0] if self.tasks else task
        moments, aside = defaultdict[str, Moments](Moments), defaultdict[str, list[Tensor]](list)
        seen, classes = 0, set[int]()
        with untouched(self.model), torch.no_grad():
            self.model.eval()
            for size, batch in batches(loader, device_of(self.model), max_batches=max_batches, progress=progress):
                x = inputs_of(batch)
                if not isinstance(x, Tensor):
                    raise XkfacError(
                        f"a batch of the loader has its inputs in a {type(x).__name__}, and a router takes one tensor; "
                        "give it batches (inputs, labels)"
                    )
                if not (self.tasks or seen):
                    self._copy(x, first)
                features, _ = self._features(x, first)
                for part, rows in features.items():
                    chosen = torch.arange(seen, seen + size, device=rows.device) % HELD_OUT == 0
                    if size > int(chosen.sum()):
                        moments[part].add(rows[~chosen])
                    if seen < MOST_HELD_OUT * HELD_OUT:
                        aside[part].append(rows[chosen])
                seen += size
                classes |= _classes(batch)
        if seen < 3:
            raise XkfacError(f"the loader of task '{task}' gave {seen} examples; a task needs at least 3")
        if not all(bool(of.mean.isfinite().all()) for of in moments.values()):
            raise NotFiniteError(f"features of task '{task}' are not finite; check its images and the network")
        self._keep(task, moments, {part: torch.cat(rows) for part, rows in aside.items()}, max(len(classes), 1))

    def _keep(self, task: str, moments: Mapping[str, Moments], aside: dict[str, Tensor], classes: int) -> None:
        """Put the densities of a task in their place, and measure on features they have not seen how sure they may be.

        moments, aside: of early and of last features.
        """
        others = [number for number, name in enumerate(self.tasks) if name != task]
        # A task that was known keeps its place: last features are those of the layers of the first one.
        place = self.tasks.index(task) if task in self.tasks else len(others)
        order = [*range(place), len(others), *range(place, len(others))]
        kept = self._densities() if others else {}
        for part, of in moments.items():
            if not others:
                blocks = self.probe.blocks if self.probe is not None and part == "early" else [len(of.mean)]
                setattr(self, f"{part}_unit", _unit(of.covariance.diagonal(), blocks))
            rank = VECTOR_RANK if self.probe is not None and self.probe.flat and part == "early" else RANK[part]
            rank = kept[part].factor.shape[2] if others else rank
            density = fit(of, getattr(self, f"{part}_unit").double(), rank, SHRINKAGE[part])
            if others:
                density = kept[part].apply(lambda one: one[others]).joined(density).apply(lambda one: one[order])
            for name in DENSITY:
                setattr(self, f"{part}_{name}", getattr(density, name))
        self.tasks = [name for name in self.tasks if name != task]
        self.tasks.insert(place, task)
        scores = self._scores(aside)
        levels = torch.linspace(0, 1, QUANTILES, device=scores.device)
        new = {
            "quantiles": torch.quantile(scores[:, place], levels),
            "temperatures": _temperature(scores, place),
            "classes": torch.tensor(float(classes), device=scores.device),
        }
        for name, value in new.items():
            before = [getattr(self, name)[others]] if others else []
            setattr(self, name, torch.cat([*before, value[None]])[order])

    def _densities(self) -> dict[str, Densities]:
        """Return the densities of early and of last features, as far as they are used."""
        if not self.tasks:
            raise XkfacError("the router knows no task yet; call add_task(task, loader) for each")
        used = [part for part in RANK if getattr(self, f"{part}_unit") is not None]
        return {part: Densities(*(getattr(self, f"{part}_{name}") for name in DENSITY)) for part in used}

    def _scores(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the scores [N, T] of early and of last features."""
        densities = self._densities()
        found = [
            (EARLY_WEIGHT if part == "early" and len(densities) > 1 else 1.0)
            * density.log_density(features[part] / getattr(self, f"{part}_unit"))
            for part, density in densities.items()
        ]
        return torch.stack(found).sum(0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _features(self, x: Any, first: str) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return early and last features [N, F] of inputs, and answers for the first task if they came out as well."""
        features, answers = {}, None
        if self.probe is not None:
            features["early"] = self.probe(x)
        if self.by == "last":
            features["last"], answers = last_features(self.model, lambda: self._answer(x, first))
        elif self.source is not None:
            source = self.source
            features["last"], _ = last_features(source, lambda: source(x))
        return features, answers

    def _copy(self, x: Any, first: str) -> None:
        """Make frozen copies of what features come from, for inputs like x."""
        if self.by == "source":
            self.source = _Fixed(plain(unwrap(self.model), first), first, self.using)
        probe = make_probe(plain(unwrap(self.model), first), x)
        if self.by == "early" or probe.sees(x):
            self.probe = probe

    def scores(self, x: Tensor) -> Tensor:
        """Return the log densities [N, T] of the features of x [N, ...] under each task, weighted and added."""
        self._densities()
        return self._scores(self._features(x, self.tasks[0])[0])

    def log_posterior(self, scores: Tensor) -> Tensor:
        """Return the log probabilities [N, T] of tasks up to a constant, of scores [N, T] or sums over one task's."""
        return scores / self.temperatures.max() + self.classes.log()

    # Which tasks a batch is of is not known before it runs.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, x: Tensor, task: str | None = None, *, together: bool = False, unknown: float = 0.0) -> Routed:
        """Return what the network answers for x [N, ...], and the tasks that the examples were taken for.

        task: that of all examples, where it is known; nothing is inferred then. together: all are of one task, which
        is inferred from all of them. unknown: the share of its own images that a task may fail to recognise; an example
        that is less likely than these under its likeliest task is unknown. 0 takes each for one of the tasks.
        """
        if not 0 <= unknown < 1:
            raise XkfacError(f"unknown is {unknown}; it must be a share from 0 to below 1")
        if self.model.training and any(norm.training for norm in norms_of(self.model).values()):
            raise XkfacError(
                "the model is in training mode, in which BN normalises with the batch at hand and its statistics move; "
                "call router.eval() before the router answers"
            )
        if task is not None:
            return self._given(x, task)
        self._densities()
        features, answers = self._features(x, self.tasks[0])
        scores = self._scores(features)
        if together:
            scores = scores.sum(0, keepdim=True).expand_as(scores)
        logits = self.log_posterior(scores)
        likeliest = tasks = logits.argmax(1)
        if unknown > 0:
            best = scores.gather(1, likeliest[:, None])[:, 0] / (len(x) if together else 1)
            tasks = torch.where(best >= self._level(unknown)[likeliest], likeliest, -1)  # unknown where it is NaN
        return Routed(self._answers(x, likeliest, answers), tasks, torch.softmax(logits, 1))

    def _level(self, unknown: float) -> Tensor:
        """Return the log density [T] that a share of a task's own images is below."""
        place = unknown * (QUANTILES - 1)
        return self.quantiles[:, int(place)].lerp(self.quantiles[:, int(place) + 1], place - int(place))

    def _given(self, x: Tensor, task: str) -> Routed:
        if task not in self.tasks:
            raise XkfacError(f"the router knows no task '{task}'; name one of {', '.join(self.tasks)}, or add it")
        outputs = self._answer(x, task)
        place = torch.full((len(outputs),), self.tasks.index(task), device=outputs.device)
        return Routed(outputs, place, nn.functional.one_hot(place, len(self.tasks)).float())

    def _answer(self, x: Tensor, task: str) -> Tensor:
        with self.using(self.model, task):
            outputs: Tensor = self.model(x)
        return outputs

    def _answers(self, x: Tensor, likeliest: Tensor, first: Tensor | None) -> Tensor:
        """Return the outputs of each example's task, one pass per task; the device is waited for once."""
        places = torch.arange(len(self.tasks), device=likeliest.device)
        counts = (likeliest[:, None] == places).sum(0).tolist()
        order = likeliest.argsort(stable=True)
        outputs = []
        for place, part in enumerate(torch.split(order, counts)):
            if place == 0 and first is not None and not torch.is_grad_enabled():
                outputs.append(first if len(part) == len(x) else first[part])
            elif len(part) == len(x):
                return self._answer(x, self.tasks[place])
            elif len(part):
                outputs.append(self._answer(x[part], self.tasks[place]))
        most = max(one.shape[1] for one in outputs)
        padded = [nn.functional.pad(one, (0, most - one.shape[1]), value=-math.inf) for one in outputs]
        return torch.cat(padded)[order.argsort()]

    def network(self, task: str) -> nn.Module:
        """Return a copy of the model with the layers of one task alone, for export, or for use without a router."""
        return _Fixed(plain(unwrap(self.model), task), task, self.using)

    def save(self, path: str | Path) -> None:
        """Write the model, its tasks' layers and heads, and the statistics to one safetensors file."""
        model = unwrap(self.model)
        description = {
            "by": self.by,
            "tasks": self.tasks,
            "probe": None if self.probe is None else self.probe.description(),
            "layers": {path: list(layer.of) for path, layer in task_layers_of(model).items()},
        }
        parts = {"model": model.state_dict()}
        parts |= {name: one.state_dict() for name in ("probe", "source") if (one := getattr(self, name)) is not None}
        parts["statistics"] = {name: one for name in STATISTICS if (one := getattr(self, name)) is not None}
        tensors = {f"{part}/{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        files.write(path, description, tensors, FORMAT)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, *, using: Using = using_task) -> Router:
        """Return the router of a file, with a model of the same class as the one that was saved.

        The model gets the weights of the file, and a `TaskLayer` wherever the saved model has one and it has not.

        Raises MemoryFileError for a file that is damaged or no router's, MismatchError for another model.
        """
        description, tensors = files.read(path, FORMAT)
        weights = _below("model/", tensors)
        try:
            for place, tasks in description["layers"].items():
                layer = model.get_submodule(place)
                if not isinstance(layer, TaskLayer):
                    model.set_submodule(place, _task_layer(layer, tasks, _below(f"{place}.of.", weights)))
            model.load_state_dict(weights)
        except (AttributeError, RuntimeError) as error:
            raise MismatchError(f"'{path}' is of another model ({error}); make the model that was saved") from None
        router = cls(model, description["by"], using=using)
        router.tasks, early = description["tasks"], description["probe"]
        if early:
            router.probe = Probe(plain(unwrap(model), router.tasks[0]), **early)
            router.probe.load_state_dict(_below("probe/", tensors))
        if router.tasks and router.by == "source":
            router.source = _Fixed(plain(unwrap(model), router.tasks[0]), router.tasks[0], using)
            router.source.load_state_dict(_below("source/", tensors))
        for name, tensor in _below("statistics/", tensors).items():
            setattr(router, name, tensor.to(device_of(model)))
        return router.eval()


class _Fixed(nn.Module):
    """A model in evaluation mode that answers for one task."""

    def __init__(self, model: nn.Module, task: str, using: Using) -> None:
        super().__init__()
        self.model, self.task, self.using = model.eval().requires_grad_(False), task, using

    def forward(self, x: Tensor) -> Tensor:
        with self.using(self.model, self.task):
            outputs: Tensor = self.model(x)
        return outputs


def _classes(batch: Any) -> set[int]:
    """Return the classes of a batch, or nothing where its labels are no numbers of classes."""
    try:
        labels = labels_of(batch)
    except XkfacError:
        return set()
    whole = isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point()
    return set(labels.tolist()) if whole else set()


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _task_layer(layer: nn.Module, tasks: list[str], weights: Mapping[str, Tensor]) -> TaskLayer:
    """Return a `TaskLayer` made of copies of a layer, linear ones with as many outputs as their weights have."""
    layers = TaskLayer(layer, tasks)
    for task in tasks if isinstance(layer, nn.Linear) else ():
        outputs, inputs = weights[f"{task}.weight"].shape
        layers.of[task] = nn.Linear(inputs, outputs, f"{task}.bias" in weights)
    return layers.to(device_of(layer)).train(layer.training)


def _unit(variance: Tensor, blocks: list[int]) -> Tensor:
    """Return the unit [F] of each feature: the root mean variance of the block that it is in.

    Features of one block share it: one that never varies in the first task, such as a pixel at the border, would
    otherwise decide alone.
    """
    means = torch.cat([part.mean().expand_as(part) for part in torch.split(variance, blocks)])
    return means.clamp(min=torch.finfo(torch.float32).tiny).sqrt().float()


def _temperature(scores: Tensor, place: int) -> Tensor:
    """Return by what to divide scores [N, T] of images of the task at a place, to be as sure as they are right."""
    choices = torch.logspace(0, 4, 161, device=scores.device)
    losses = torch.stack([-torch.log_softmax(scores / choice, 1)[:, place].mean() for choice in choices])
    return choices[losses.argmin()]
