"""The memory, kept of the past in place of its data: an anchor, a curvature, and how many tasks they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xkfac import storage
from xkfac.batches import Forward
from xkfac.curvature import Curvature, Settings
from xkfac.errors import MemoryFileError, MismatchError, XkfacError
from xkfac.estimation import Estimate, estimate
from xkfac.kronecker import Block, Corrected, Diagonal, KhatriRao, Kronecker, assemble, khatri_rao, parts
from xkfac.likelihood import LIKELIHOODS, Likelihood, get_likelihood
from xkfac.merging import anchor_of, bind
from xkfac.methods import Method, get_method
from xkfac.passes import Progress, unwrap
from xkfac.units import Convolution, Coverage, Row, Unit

_BLOCKS: dict[str, type[Block]] = {"kronecker": Kronecker, "diagonal": Diagonal, "corrected": Corrected}
_STORED = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Memory:
    """What a network needs to remember its past tasks.

    anchor: the merged weights W~* under population statistics, [groups, rows, columns] by unit. curvature: the Fisher
    information at the anchor, averaged over tasks. tasks: how many tasks T it stands for. coverage: the units and a row
    for every parameter. method, likelihood, exclude: how it was made, and how `extend` goes on. examples: how many
    examples the curvature rests on.
    """

    anchor: Mapping[str, Tensor]
    curvature: Curvature
    tasks: int
    coverage: Coverage
    method: Method
    likelihood: Likelihood
    exclude: tuple[str, ...] = ()
    examples: int = 0

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that the memory protects."""
        return self.coverage.units

    def check(self, model: nn.Module) -> None:
        """Raise MismatchError for the first unit that `model` does not have, or has in another shape."""
        bind(model, self.units)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """Return the memory on a device, its floating-point numbers in a dtype."""
        anchor = {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.anchor.items()}
        return replace(self, anchor=anchor, curvature=self.curvature.to(device, dtype))

    def extend(self, model: nn.Module, new: Estimate, own: float, others: float, *, keep_all: bool = False) -> Memory:
        """Return the memory of one task more: H <- own * H + others * H_t, anchored at `model` (postprocessing).

        Raises MismatchError when a unit was found in another shape than before.
        """
        before = {unit.name: unit for unit in self.units}
        for unit in new.coverage.units:
            old = before.get(unit.name, unit)
            if (old.kind, old.shape, old.norm) != (unit.kind, unit.shape, unit.norm):
                raise MismatchError(
                    f"unit '{unit.name}' is {unit.kind} {list(unit.shape)} now and was {old.kind} {list(old.shape)} "
                    "in the memory; extend a memory with the network it was made from"
                )
        units = {unit.name: unit for unit in (*self.units, *new.coverage.units)}
        rows = {row.parameter: row for row in (*self.coverage.rows, *new.coverage.rows)}
        curvature = self.curvature.extend(new.curvature, own, others, keep_all=keep_all)
        return replace(
            self,
            anchor=anchor_of(model, units.values()),
            curvature=curvature,
            tasks=self.tasks + 1,
            coverage=Coverage(tuple(units.values()), tuple(rows.values())),
            examples=self.examples + new.examples,
        )

    def summary(self) -> str:
        """Return a table of every parameter with its unit, kind and size, below a line on the memory itself."""
        numbers = sum(tensor.numel() for _, tensor in self.curvature.tensors())
        tasks = "1 task" if self.tasks == 1 else f"{self.tasks} tasks"
        head = f"memory of {tasks}, method {self.method.name}, {self.examples:,} examples"
        return f"{head}, curvature of {numbers:,} numbers\n{self.coverage}"

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the memory to a safetensors file, atomically, its curvature in `dtype`.

        The anchor is kept in float32 at least: rounded, it would pull the weights away from where they are.
        """
        if dtype not in _STORED:
            raise XkfacError(f"a memory is stored in {', '.join(map(str, _STORED))}, not {dtype}")
        exact = torch.promote_types(dtype, torch.float32)
        tensors = {f"anchor/{name}": tensor.to(exact) for name, tensor in self.anchor.items()}
        for name, block in self.curvature.blocks.items():
            tensors.update(_packed(f"curvature/{name}", block, dtype))
        if self.curvature.joint is not None:
            tensors.update(_packed("joint", self.curvature.joint, dtype))
        storage.write(path, self._description(), tensors)

    def _description(self) -> dict[str, Any]:
        names = {block: name for name, block in _BLOCKS.items()}
        joint = self.curvature.joint
        return {
            "tasks": self.tasks,
            "examples": self.examples,
            "exclude": list(self.exclude),
            "method": asdict(self.method),
            "likelihood": {"name": self.likelihood.name, "arguments": self.likelihood.arguments},
            "units": [asdict(unit) for unit in self.units],
            "rows": [asdict(row) for row in self.coverage.rows],
            "blocks": {name: names[type(block)] for name, block in self.curvature.blocks.items()},
            "joint": joint and {"units": self.curvature.joint_units, "rows": joint.rows, "columns": joint.columns},
        }

    @classmethod
    def load(
        cls, path: str | Path, model: nn.Module | None = None, *, device: torch.device | str | None = None
    ) -> Memory:
        """Read a memory from a file, onto a device, and check it unit by unit against `model` if one is given.

        Raises MemoryFileError for a damaged, foreign or newer file, MismatchError for another network's.
        """
        description, tensors = storage.read(path)
        try:
            memory = _rebuild(description, tensors)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise MemoryFileError(f"'{path}' is damaged: its header does not describe its tensors ({error})") from None
        for unit, tensor in (*memory.anchor.items(), *memory.curvature.tensors()):
            if not bool(tensor.isfinite().all()):
                raise MemoryFileError(f"'{path}' holds numbers of unit '{unit}' that are not finite; make it again")
        if model is not None:
            memory.check(model)
        return memory if device is None else memory.to(device)


def _packed(prefix: str, block: Block | KhatriRao, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a block's tensors for a file: factors of Kronecker products as triangles."""
    packed = {}
    for name, tensor in parts(block).items():
        is_factor = isinstance(block, (Kronecker, KhatriRao)) and not name.startswith("root")
        packed[f"{prefix}/{name}"] = (storage.triangle(tensor) if is_factor else tensor).to(dtype)
    return packed


def _unpacked(prefix: str, is_kronecker: bool, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {key.removeprefix(f"{prefix}/"): value for key, value in tensors.items() if key.startswith(f"{prefix}/")}
    wide = {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in named.items()}
    return {
        name: storage.symmetric(value) if is_kronecker and not name.startswith("root") else value
        for name, value in wide.items()
    }


def _rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    units = tuple(_unit(entry) for entry in description["units"])
    blocks = {}
    for name, kind in description["blocks"].items():
        like = _BLOCKS[kind]
        blocks[name] = assemble(like, _unpacked(f"curvature/{name}", like is Kronecker, tensors))
    joint, members = None, ()
    if description["joint"]:
        entry = description["joint"]
        joint, members = khatri_rao(_unpacked("joint", True, tensors), entry["rows"], entry["columns"]), entry["units"]
    method = dict(description["method"])
    settings = Settings(**method.pop("settings"))
    likelihood = description["likelihood"]
    return Memory(
        anchor={unit.name: tensors[f"anchor/{unit.name}"] for unit in units},
        curvature=Curvature(blocks, joint, tuple(members)),
        tasks=description["tasks"],
        coverage=Coverage(units, tuple(Row(**row) for row in description["rows"])),
        method=Method(settings=settings, **method),
        likelihood=_likelihood(likelihood["name"], likelihood["arguments"]),
        exclude=tuple(description["exclude"]),
        examples=description["examples"],
    )


def _unit(entry: Mapping[str, Any]) -> Unit:
    fields = dict(entry)
    convolution = fields.pop("convolution")
    if convolution is not None:
        padding = tuple(tuple(pair) for pair in convolution.pop("padding"))
        convolution = Convolution(padding=padding, **{name: tuple(value) for name, value in convolution.items()})
    return Unit(**{**fields, "shape": tuple(fields["shape"]), "convolution": convolution})


class _Unknown(Likelihood):
    """Stands for a user's likelihood that a file can only name."""

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        raise XkfacError(
            f"the memory was made with the likelihood '{self.name}', which its file cannot hold; "
            "pass likelihood=... again"
        )

    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        return self.sample(output, torch.Generator())


def _likelihood(name: str, arguments: Mapping[str, float]) -> Likelihood:
    if name in LIKELIHOODS:
        return LIKELIHOODS[name](**arguments)
    unknown = _Unknown()
    unknown.name = name
    return unknown


def consolidate(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method = "xkfac",
    *,
    likelihood: str | Likelihood = "categorical",
    exclude: Iterable[str] = (),
    forward: Forward | None = None,
    max_batches: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Progress = False,
    **changes: Any,
) -> Memory:
    """Make the memory of the task that `model` has just learnt, while its data is there.

    `method` is one of `METHODS`: xkfac, kfac, corrected, diagonal, ewc, fixed-bn, fine-tuning. `changes` are fields of
    `Method` and `Settings`, such as `form="mean"`. The other arguments are those of `estimate`. The model is left as it
    was, bit by bit.
    """
    chosen = get_method(method, **changes)
    likelihood = get_likelihood(likelihood)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    new = estimate_for(
        chosen,
        model,
        loader,
        likelihood=likelihood,
        exclude=exclude,
        forward=forward,
        max_batches=max_batches,
        dtype=dtype,
        seed=seed,
        progress=progress,
    )
    anchor = anchor_of(model, new.coverage.units)
    return Memory(anchor, new.curvature, 1, new.coverage, chosen, likelihood, exclude, new.examples)


def estimate_for(method: Method, model: nn.Module, loader: Iterable[Any], **options: Any) -> Estimate:
    """Return the curvature that a method asks for; an empty one where nothing is penalised."""
    if not method.penalised:
        named = unwrap(model).named_parameters()
        rows = tuple(Row(name, "-", "unprotected", parameter.numel()) for name, parameter in named)
        return Estimate(Curvature({}), Coverage((), rows), 0)
    return estimate(model, loader, **asdict(method.settings), merge=method.merge, units=method.units, **options)
