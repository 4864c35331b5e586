"""The memory, kept of the past in place of its data: an anchor, a curvature, and how many tasks they stand for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from xkfac import storage
from xkfac.batches import Forward, unknown_forward
from xkfac.calibration import Calibration
from xkfac.curvature import Curvature, Settings, is_finite
from xkfac.errors import MemoryFileError, NotFiniteError, XkfacError
from xkfac.estimation import Estimate, estimate
from xkfac.kronecker import Block, Corrected, Diagonal, KhatriRao, Kronecker, assemble, khatri_rao, parts, symmetrised
from xkfac.likelihood import LIKELIHOODS, Likelihood, get_likelihood
from xkfac.merging import anchor_of, bind
from xkfac.methods import Method, get_method
from xkfac.passes import Progress, device_of, full_precision, unwrap
from xkfac.structure import Pass, check_structure, leave_out
from xkfac.tasklayers import own_patterns
from xkfac.tracing import Convolution
from xkfac.units import Coverage, Row, Unit, as_patterns

_BLOCKS: dict[str, type[Block]] = {"kronecker": Kronecker, "diagonal": Diagonal, "corrected": Corrected}
_STORED = (torch.float32, torch.bfloat16, torch.float64)


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
        scale = "" if self.calibration is None else f", penalty to be scaled by {self.calibration.scale:.3g}"
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
        """Return the memory without the units that patterns match, such as "head*"; these are excluded from then on.

        For heads that were not left out when the memory was made: they are free to be replaced then.

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

    def extend(self, model: nn.Module, new: Estimate, own: float, others: float, *, keep_all: bool = False) -> Memory:
        """Return the memory of one task more: H <- own * H + others * H_t, anchored at `model` (postprocessing).

        Two terms become the one Kronecker product that has the partial traces of their weighted sum (see
        `xkfac.averaging`), or with `keep_all` all terms are kept; a unit of one side alone counts zero on the other.

        Raises MismatchError when a unit was found in another shape, or made of other parts, than before.
        """
        for value in (own, others):
            if not 0 <= value < float("inf"):
                raise XkfacError(f"the importance of a task must be a number of at least 0, not {value}")
        check_structure(self.coverage, Pass(new.coverage))
        units = {unit.name: unit for unit in (*self.units, *new.coverage.units)}
        rows = {row.parameter: row for row in self.coverage.rows}
        rows.update({r.parameter: r for r in new.coverage.rows if r.unit != "-" or r.parameter not in rows})
        homogeneous = {unit.name for unit in units.values() if unit.homogeneous}
        before = self.curvature.to(device_of(unwrap(model)))
        with full_precision(device_of(unwrap(model))):
            extended = before.extend(new.curvature, own, others, keep_all=keep_all, homogeneous=homogeneous)
        anchor, curvature = _uniform(_anchor(model, units.values()), extended)
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

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write the memory to a safetensors file, atomically, its curvature in `dtype`, by default in its own.

        `dtype` is float32, bfloat16 or float64. The anchor is kept in float32 at least: rounded, it would pull the
        weights away from where they are. In bfloat16 the Kronecker factors are stored by their Cholesky roots, which
        stay positive semi-definite when rounded.

        Raises MemoryFileError when the file cannot be written, XkfacError for numbers that are not finite in `dtype`.
        """
        if dtype is None:
            dtype = next((tensor.dtype for _, tensor in self.curvature.tensors()), torch.float32)
            dtype = torch.promote_types(dtype, torch.float32)
        if dtype not in _STORED:
            raise XkfacError(f"a memory is stored in {', '.join(map(str, _STORED))}, not {dtype}; choose one of these")
        for unit, tensor in (*self.anchor.items(), *self.curvature.tensors()):
            if not is_finite(tensor.to(dtype)):
                raise XkfacError(
                    f"numbers of unit '{unit}' are not finite in {dtype}; make the memory again, or save it in float64"
                )
        storage.write(path, {**self._description(), "roots": dtype is torch.bfloat16}, self._stored(dtype))

    def _stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        exact = torch.promote_types(dtype, torch.float32)
        tensors = {f"anchor/{name}": tensor.to(exact) for name, tensor in self.anchor.items()}
        for name, block in self.curvature.blocks.items():
            tensors.update(_packed(f"curvature/{name}", block, dtype))
        if self.curvature.joint is not None:
            tensors.update(_packed("joint", self.curvature.joint, dtype))
        return tensors

    def _description(self) -> dict[str, Any]:
        names = {block: name for name, block in _BLOCKS.items()}
        joint = self.curvature.joint
        return {
            "tasks": self.tasks,
            "examples": self.examples,
            "exclude": list(self.exclude),
            "method": asdict(self.method),
            "likelihood": _named(self.likelihood),
            "units": [asdict(unit) for unit in self.units],
            "rows": [asdict(row) for row in self.coverage.rows],
            "blocks": {name: names[type(block)] for name, block in self.curvature.blocks.items()},
            "calibration": self.calibration and asdict(self.calibration),
            "forward": self.forward is not None,
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


def _is_factor(block: type[Block] | type[KhatriRao], part: str) -> bool:
    """Whether a part of a block is a symmetric matrix, which a file holds as a triangle."""
    return block in (Kronecker, KhatriRao) and not part.startswith("root")


def _packed(prefix: str, block: Block | KhatriRao, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a block's tensors for a file: factors of Kronecker products as triangles, in bfloat16 of their roots."""
    packed = {}
    for part, tensor in parts(block).items():
        if _is_factor(type(block), part):
            tensor = storage.triangle(storage.lower_root(tensor) if dtype is torch.bfloat16 else tensor)
        packed[f"{prefix}/{part}"] = tensor.to(dtype)
    return packed


def _unpacked(
    prefix: str, block: type[Block] | type[KhatriRao], tensors: Mapping[str, Tensor], roots: bool
) -> dict[str, Tensor]:
    """Return a block's tensors from a file's: the inverse of `_packed`, in float32 at least."""
    named = {}
    for key, value in tensors.items():
        path, _, part = key.rpartition("/")
        if path == prefix:
            named[part] = value.to(torch.promote_types(value.dtype, torch.float32))
    for part in filter(functools.partial(_is_factor, block), list(named)):
        named[part] = storage.symmetric(named[part])
        if roots:
            root = named[part].tril()
            named[part] = symmetrised(root @ root.mT)
    return named


def _rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Memory:
    units = tuple(_unit(entry) for entry in description["units"])
    roots = description["roots"]
    blocks = {}
    for name, kind in description["blocks"].items():
        like = _BLOCKS[kind]
        blocks[name] = assemble(like, _unpacked(f"curvature/{name}", like, tensors, roots))
    joint, members = None, ()
    if description["joint"]:
        entry = description["joint"]
        joint = khatri_rao(_unpacked("joint", KhatriRao, tensors, roots), entry["rows"], entry["columns"])
        members = entry["units"]
    anchor, curvature = _uniform(
        {unit.name: tensors[f"anchor/{unit.name}"] for unit in units}, Curvature(blocks, joint, tuple(members))
    )
    _check_shapes(units, anchor, curvature)
    method = dict(description["method"])
    settings = Settings(**method.pop("settings"))
    likelihood = description["likelihood"]
    calibration = description.get("calibration")  # files from before there were calibrations have none
    return Memory(
        anchor=anchor,
        curvature=curvature,
        tasks=description["tasks"],
        coverage=Coverage(units, tuple(Row(**row) for row in description["rows"])),
        method=Method(settings=settings, **method),
        likelihood=_likelihood(likelihood["name"], likelihood["arguments"]),
        exclude=tuple(description["exclude"]),
        examples=description["examples"],
        calibration=calibration and Calibration.read(calibration),
        forward=unknown_forward if description.get("forward") else None,  # a key that older files do not have
    )


def _check_shapes(units: Iterable[Unit], anchor: Mapping[str, Tensor], curvature: Curvature) -> None:
    """Raise ValueError for a unit whose anchor or curvature is missing or of another shape."""
    shapes = {unit.name: unit.shape for unit in units}
    found = {name: tuple(block.diagonal().shape) for name, block in curvature.blocks.items()}
    joint = curvature.joint
    if joint is not None:
        sizes = {(sum(joint.rows), sum(joint.columns)) == (t.right.shape[-1], t.left.shape[-1]) for t in joint.terms}
        if sizes != {True}:
            raise ValueError("the factors across layers are of another size than their units")
        members = zip(curvature.joint_units, joint.rows, joint.columns, strict=True)
        found.update({name: (1, rows, columns) for name, rows, columns in members})
    for name in {*shapes, *found}:
        if not shapes.get(name) == found.get(name) == tuple(anchor[name].shape):
            raise ValueError(f"unit '{name}' is of another shape than its tensors")


def _anchor(model: nn.Module, units: Iterable[Unit]) -> dict[str, Tensor]:
    anchor = anchor_of(model, units)
    for name, tensor in anchor.items():
        if not is_finite(tensor):
            raise NotFiniteError(
                f"the merged weight of unit '{name}' is not finite; check the model's weights and BN statistics"
            )
    return anchor


def _uniform(anchor: Mapping[str, Tensor], curvature: Curvature) -> tuple[Mapping[str, Tensor], Curvature]:
    """Return both in the widest dtype of either, so that displacements from the anchor meet the curvature's.

    All is laid out row by row, as a file holds it: matrix products round by the layout of their operands, and a memory
    from a file goes on to the same bits as one in process.
    """
    dtypes = {tensor.dtype for _, tensor in (*anchor.items(), *curvature.tensors())}
    widest = functools.reduce(torch.promote_types, dtypes, torch.bfloat16)
    alike = {name: tensor.to(widest).contiguous() for name, tensor in anchor.items()}
    return alike, curvature._map(lambda tensor: tensor.to(widest).contiguous())


def _unit(entry: Mapping[str, Any]) -> Unit:
    fields = dict(entry)
    convolution = fields.pop("convolution")
    if convolution is not None:
        padding = tuple(tuple(pair) for pair in convolution.pop("padding"))
        convolution = Convolution(padding=padding, **{name: tuple(value) for name, value in convolution.items()})
    return Unit(**{**fields, "shape": tuple(fields["shape"]), "convolution": convolution})


class _Unknown(Likelihood):
    """Stands for a user's likelihood that a file can only name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self) -> NoReturn:
        raise XkfacError(
            f"the memory was made with the likelihood '{self.name}', which its file cannot hold; "
            "pass likelihood=... again"
        )

    def predictions(self, output: Tensor) -> int:
        self._refuse()

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        self._refuse()

    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        self._refuse()

    def root(self, output: Tensor) -> Iterator[Tensor]:
        self._refuse()


def _named(likelihood: Likelihood) -> dict[str, Any]:
    """Return a likelihood's entry in a file; arguments are None for a user's own, which the file can only name."""
    if LIKELIHOODS.get(likelihood.name) is not type(likelihood):
        return {"name": likelihood.name, "arguments": None}
    return {"name": likelihood.name, "arguments": {key: float(value) for key, value in likelihood.arguments.items()}}


def _likelihood(name: str, arguments: Mapping[str, float] | None) -> Likelihood:
    return _Unknown(name) if arguments is None else LIKELIHOODS[name](**arguments)


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
    graph: bool = False,
    **changes: Any,
) -> Memory:
    """Make the memory of the task that `model` has just learnt, while its data is there.

    `method` is one of `METHODS`: xkfac, kfac, corrected, diagonal, unmerged, ewc, fixed-bn, fine-tuning. `changes`
    are fields of `Method` and `Settings`, such as `form="mean"`. The other arguments are those of `estimate`. The model
    is left as it was, bit by bit.
    """
    chosen = get_method(method, **changes)
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
        dtype=dtype,
        seed=seed,
        progress=progress,
        graph=graph,
    )
    anchor, curvature = _uniform(_anchor(model, new.coverage.units), new.curvature)
    return Memory(anchor, curvature, 1, new.coverage, chosen, likelihood, exclude, new.examples, forward=forward)


def estimate_for(method: Method, model: nn.Module, loader: Iterable[Any], **options: Any) -> Estimate:
    """Return the curvature that a method asks for; an empty one where nothing is penalised."""
    if not method.penalised:
        named = unwrap(model).named_parameters()
        rows = tuple(Row(name, "-", "unprotected", parameter.numel()) for name, parameter in named)
        return Estimate(Curvature({}), Coverage((), rows), 0)
    options["exclude"] = excluded_by(method, model, options.get("exclude") or ())
    return estimate(model, loader, **asdict(method.settings), merge=method.merge, units=method.units, **options)


def excluded_by(method: Method, model: nn.Module, exclude: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of what a method leaves out of the units: the user's, and layers that tasks own."""
    return (*as_patterns(exclude), *own_patterns(unwrap(model), norms=method.own_bn))
