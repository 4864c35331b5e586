"""The memory, kept of the past in place of its data: an anchor, a curvature, and how many tasks they stand for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from xkfac import files as storage
from xkfac.calibration import Calibration
from xkfac.curvature.estimate import Estimate, estimate
from xkfac.curvature.operator import Curvature, is_finite
from xkfac.errors import MemoryFileError, XkfacError
from xkfac.memory_file import BLOCKS, STORED, Description, Joint, Likely, packed, rebuilt
from xkfac.methods import Method, MethodOptions, get_method
from xkfac.model.batches import Forward
from xkfac.model.likelihood import Likelihood, get_likelihood
from xkfac.model.merged_weight import anchor_of, bind
from xkfac.model.passes import Progress, device_of, full_precision, unwrap
from xkfac.model.structure import check_structure, leave_out
from xkfac.model.units import Coverage, Row, Unit, as_patterns
from xkfac.task_layers import own_patterns


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """What a network needs to remember its past tasks.

    anchor: the merged weights W~* under population statistics, [groups, rows, columns] by unit. curvature: the Fisher
    information at the anchor, averaged over tasks. tasks: how many tasks T it stands for. coverage: the units and a row
    for every parameter. method, likelihood, exclude: how it was made, and how `extend` goes on. examples: how many
    examples the curvature rests on. calibration: what `calibrate` measured, None without it; it goes on to the memory
    of further tasks as it is. forward: how the model takes a batch, kept for `begin`, `finish` and `calibrate`; a file
    can only say that there was one.
    """

    anchor: Mapping[str, Tensor]
    curvature: Curvature
    tasks: int
    coverage: Coverage
    method: Method
    likelihood: Likelihood
    exclude: tuple[str, ...] = ()
    examples: int = 0
    calibration: Calibration | None = None
    forward: Forward | None = None

    def __repr__(self) -> str:
        tasks = "1 task" if self.tasks == 1 else f"{self.tasks} tasks"
        numbers = sum(tensor.numel() for _, tensor in self.curvature.tensors())
        head = f"memory of {tasks}, method {self.method.name}, {self.examples:,} examples"
        scale = "" if self.calibration is None else f", calibration: {self.calibration}"
        forward = "" if self.forward is None else ", with a forward function of its own"
        return f"{head}, curvature of {numbers:,} numbers{scale}{forward}"

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

    def without(self, *patterns: str) -> Memory:
        """Return the memory without the units that patterns match, such as "head*", which are excluded from then on.

        Raises UnitError for a pattern that matches no unit, or a part of one alone.
        """
        names, coverage = leave_out(self.coverage, patterns)
        return replace(
            self,
            anchor={name: tensor for name, tensor in self.anchor.items() if name not in names},
            curvature=self.curvature.without(names),
            coverage=coverage,
            exclude=tuple(dict.fromkeys([*self.exclude, *patterns])),
        )

    def extend(
        self, model: nn.Module, new: Estimate, *, weights: tuple[float, float], keep_all: bool = False
    ) -> Memory:
        """Return the memory of one task more: H <- ls * H + lt * H_t for weights (ls, lt), anchored at `model`.

        Two terms become one Kronecker product that has the trace of their weighted sum (see
        `curvature.averaging`), or with `keep_all` all are kept; a unit of one side alone counts zero on the other.

        Raises MismatchError when a unit was found in another shape, or made of other parts, than before.
        """
        for value in weights:
            if not 0 <= value < float("inf"):
                raise XkfacError(f"the importance of a task must be a number of at least 0, not {value}")
        check_structure(self.coverage, new.coverage)
        units = {unit.name: unit for unit in (*self.units, *new.coverage.units)}
        rows = {row.parameter: row for row in self.coverage.rows}
        rows.update({r.parameter: r for r in new.coverage.rows if r.unit != "-" or r.parameter not in rows})
        homogeneous = {unit.name for unit in units.values() if unit.homogeneous}
        before = self.curvature.to(device_of(unwrap(model)))
        within = self.method.settings.within_examples and not keep_all
        with full_precision(device_of(unwrap(model))):
            extended = before.extend(
                new.curvature, *weights, keep_all=keep_all, homogeneous=homogeneous, within_examples=within
            )
        anchor, curvature = _uniform(anchor_of(model, units.values()), extended)
        return replace(
            self,
            anchor=anchor,
            curvature=curvature,
            tasks=self.tasks + 1,
            coverage=Coverage(tuple(units.values()), tuple(rows.values())),
            examples=self.examples + new.examples,
        )

    def summary(self) -> str:
        """Return a table of every parameter with its unit, kind and size, below a line on the memory itself."""
        return f"{self!r}\n{self.coverage.noted(self.curvature.zero_units(), 'curvature is zero')}"

    def save(self, path: str | Path, storage_dtype: torch.dtype | None = None) -> None:
        """Write the memory to a safetensors file, atomically, its curvature in `storage_dtype`.

        That is float32, bfloat16 or float64, by default the curvature's own. The anchor is kept in float32 at least:
        rounded, it would pull the weights away from where they are. With bfloat16 the Kronecker factors are stored
        as correlations of 16 bits, shrunk by what keeps them positive semi-definite (see `files.correlations`).

        Raises MemoryFileError when the file cannot be written, XkfacError for numbers that are not finite in it.
        """
        dtype = storage_dtype
        if dtype is None:
            dtype = next((tensor.dtype for _, tensor in self.curvature.tensors()), torch.float32)
            dtype = torch.promote_types(dtype, torch.float32)
        if dtype not in STORED:
            raise XkfacError(f"a memory is stored in {', '.join(map(str, STORED))}, not {dtype}; choose one of these")
        for unit, tensor in (*self.anchor.items(), *self.curvature.tensors()):
            if not is_finite(tensor.to(dtype)):
                raise XkfacError(f"numbers of unit '{unit}' are not finite in {dtype}; make it again, or use float64")
        storage.write(path, asdict(self._description()), self._stored(dtype))

    def _stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        tensors = {f"anchor/{name}": tensor.to(exact) for name, tensor in self.anchor.items()}
        for name, block in self.curvature.blocks.items():
            tensors.update(packed(f"curvature/{name}", block, dtype))
        if self.curvature.joint is not None:
            tensors.update(packed("joint", self.curvature.joint, dtype))
        return tensors

    def _description(self) -> Description:
        names = {block: name for name, block in BLOCKS.items()}
        joint = self.curvature.joint
        return Description(
            self.tasks,
            self.examples,
            self.exclude,
            self.method,
            Likely.of(self.likelihood),
            self.units,
            self.coverage.rows,
            {name: names[type(block)] for name, block in self.curvature.blocks.items()},
            self.calibration,
            self.forward is not None,
            None if joint is None else Joint(self.curvature.joint_units, joint.rows, joint.columns),
        )

    @classmethod
    def load(
        cls, path: str | Path, model: nn.Module | None = None, *, device: torch.device | str | None = None
    ) -> Memory:
        """Read a memory from a file, onto a device, and check it unit by unit against `model` if one is given.

        Raises MemoryFileError for a damaged, foreign or newer file, MismatchError for another network's.
        """
        description, tensors = storage.read(path)
        try:
            memory = cls(**rebuilt(description, tensors))
            anchor, curvature = _uniform(memory.anchor, memory.curvature)
            memory = replace(memory, anchor=anchor, curvature=curvature)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise MemoryFileError(
                f"'{path}' is damaged: its header does not describe its tensors ({error}); fetch or make it again"
            ) from None
        for unit, tensor in (*memory.anchor.items(), *memory.curvature.tensors()):
            if not is_finite(tensor):
                raise MemoryFileError(f"'{path}' holds numbers of unit '{unit}' that are not finite; make it again")
        if model is not None:
            memory.check(model)
        return memory if device is None else memory.to(device)


def _uniform(anchor: Mapping[str, Tensor], curvature: Curvature) -> tuple[Mapping[str, Tensor], Curvature]:
    """Return both in the widest dtype of either, so that displacements from the anchor meet the curvature's.

    All is laid out row by row at aligned addresses, as from a file: matrix products round by the layout of their
    operands, and a memory from a file goes on to the same bits as one in process.
    """
    dtypes = {tensor.dtype for _, tensor in (*anchor.items(), *curvature.tensors())}
    widest = functools.reduce(torch.promote_types, dtypes, torch.bfloat16)
    alike = {name: _laid_out(tensor.to(widest)) for name, tensor in anchor.items()}
    return alike, curvature._map(lambda tensor: _laid_out(tensor.to(widest)))


def _laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor as a new one lies in memory: row by row, also along dimensions of size 1, and aligned."""
    plain = tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
    return tensor if plain and tensor.data_ptr() % 64 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def with_options(
    memory: Memory,
    *,
    likelihood: str | Likelihood | None = None,
    exclude: Iterable[str] | None = None,
    forward: Forward | None = None,
) -> Memory:
    """Return a memory that goes on with other options, those that are given."""
    return replace(
        memory,
        likelihood=memory.likelihood if likelihood is None else get_likelihood(likelihood),
        exclude=memory.exclude if exclude is None else as_patterns(exclude),
        forward=memory.forward if forward is None else forward,
    )


def consolidate(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Method = "fixed-bn",
    *,
    likelihood: str | Likelihood = "categorical",
    exclude: Iterable[str] = (),
    forward: Forward | None = None,
    max_batches: int | None = None,
    accumulation_dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Progress = False,
    graph: bool = False,
    **options: Unpack[MethodOptions],
) -> Memory:
    """Make the memory of the task that `model` has just learnt, while its data is there.

    `method` is one of `METHODS`, or a `Method`: by default `fixed-bn`, which keeps BN as it is and protects every
    layer with its BN by hierarchical Kronecker factors; `paper` is XK-FAC as the paper has it. `options` change
    fields of it and of its `Settings`, such as `form="paper"`; one that would have no effect is refused. The other
    arguments are those of `estimate`. The model is left as it was, bit by bit.
    """
    chosen = get_method(method, **options)
    likelihood = get_likelihood(likelihood)
    exclude = as_patterns(exclude)
    new = estimate_for(
        chosen,
        model,
        loader,
        likelihood=likelihood,
        exclude=exclude,
        forward=forward,
        max_batches=max_batches,
        accumulation_dtype=accumulation_dtype,
        seed=seed,
        progress=progress,
        graph=graph,
    )
    anchor, curvature = _uniform(anchor_of(model, new.coverage.units), new.curvature)
    return Memory(anchor, curvature, 1, new.coverage, chosen, likelihood, exclude, new.examples, forward=forward)


def estimate_for(method: Method, model: nn.Module, loader: Iterable[Any], **options: Any) -> Estimate:
    """Return the curvature that a method asks for; an empty one where nothing is penalised."""
    if not method.penalised:
        named = unwrap(model).named_parameters()
        rows = tuple(Row(name, "-", "unprotected", parameter.numel()) for name, parameter in named)
        return Estimate(Curvature({}), Coverage((), rows), 0)
    options["exclude"] = excluded_by(method, model, options.get("exclude") or ())
    return estimate(model, loader, method.settings, merge=method.merge, per_parameter=method.per_parameter, **options)


def excluded_by(method: Method, model: nn.Module, exclude: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of what a method leaves out of the units: the user's, and layers that tasks own."""
    return (*as_patterns(exclude), *own_patterns(unwrap(model), norms=method.own_bn))
