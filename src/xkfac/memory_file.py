"""What a memory file says: its description and its tensors, both ways, every field checked when it is read.

A digest tells damage, not intent: a file can be made to say anything. So every word has its type and range, every
tensor its shape and, as far as that can be seen at little cost, its values; and no tensor is left over.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from xkfac import files as storage
from xkfac.calibration import Calibration
from xkfac.curvature.blocks import Block, Corrected, Diagonal, KhatriRao, Kronecker, assemble, khatri_rao, parts
from xkfac.curvature.gram import size_of, symmetric, triangle
from xkfac.curvature.operator import Curvature
from xkfac.errors import XkfacError
from xkfac.methods import Method
from xkfac.model.batches import unknown_forward
from xkfac.model.likelihood import LIKELIHOODS, Likelihood
from xkfac.model.tracing import Convolution
from xkfac.model.units import Coverage, Row, Unit
from xkfac.plain_values import from_plain

BlockName = Literal["kronecker", "diagonal", "corrected"]
BLOCKS: dict[BlockName, type[Block]] = {"kronecker": Kronecker, "diagonal": Diagonal, "corrected": Corrected}
STORED = (torch.float32, torch.bfloat16, torch.float64)

_DIAGONAL = ".diagonal"  # in a name: the diagonal that goes with correlations
_ROUGHLY = 1e-2  # of the largest number: what rounding, to bfloat16 too, may do to a factor

Shape = tuple[int, int, int]


def packed(prefix: str, block: Block | KhatriRao, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a block's tensors for a file: factors of Kronecker products as triangles, for bfloat16 as correlations."""
    tensors = {}
    for part, tensor in parts(block).items():
        name = f"{prefix}/{part}"
        if not isinstance(block, (Kronecker, KhatriRao)) or part.startswith("root"):
            tensors[name] = tensor.to(dtype)
        elif dtype is torch.bfloat16:
            tensors[name], tensors[name + _DIAGONAL] = storage.correlations(tensor)
        else:
            tensors[name] = triangle(tensor).to(dtype)
    return tensors


@dataclass(frozen=True)
class Likely:
    """A likelihood's entry in a file; arguments are None for a user's own, which the file can only name."""

    name: str
    arguments: dict[str, float] | None

    @classmethod
    def of(cls, likelihood: Likelihood) -> Self:
        """Return the entry of a likelihood."""
        if LIKELIHOODS.get(likelihood.name) is not type(likelihood):
            return cls(likelihood.name, None)
        return cls(likelihood.name, {key: float(value) for key, value in likelihood.arguments.items()})

    def likelihood(self) -> Likelihood:
        """Return the likelihood that the entry is of."""
        return _Unknown(self.name) if self.arguments is None else LIKELIHOODS[self.name](**self.arguments)


@dataclass(frozen=True)
class Joint:
    """The units that have factors across layers, and the partition of these."""

    units: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """What a memory file says beside its tensors, as `Memory` explains it; blocks: the kind of each unit's block."""

    tasks: int
    examples: int
    exclude: tuple[str, ...]
    method: Method
    likelihood: Likely
    units: tuple[Unit, ...]
    rows: tuple[Row, ...]
    blocks: dict[str, BlockName]
    calibration: Calibration | None
    forward: bool
    joint: Joint | None
    roots: Literal[False] = False  # the form of rounded factors before correlations, which is no longer read

    def __post_init__(self) -> None:
        _need(self.tasks >= 1, "its number of tasks is none")
        names = [unit.name for unit in self.units]
        _need(len(set(names)) == len(names), "two units have one name")
        for unit in self.units:
            _need(_is_consistent(unit), f"unit '{unit.name}' is of no kind that there is")
        parts = [part for unit in self.units for part in (unit.weight, unit.bias, unit.norm) if part is not None]
        _need(len(set(parts)) == len(parts), "two units have a part in common")
        _need(self.method.penalised or not names, f"method '{self.method.name}' has no units, and there are some")
        for row in self.rows:
            _need(row.unit in ("-", *names), f"the row of '{row.parameter}' is of no unit that there is")


def rebuilt(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of the memory that a file describes, by name.

    Raises ValueError, LookupError or TypeError where the description is none, or does not describe the tensors.
    """
    match plain:
        case {"method": {"settings": {"noise": 0} as settings}}:  # a setting of before, without effect in this file
            del settings["noise"]
    description: Description = from_plain(Description, plain, "its description")
    anchor, curvature = _tensors(description, tensors)
    return {
        "anchor": anchor,
        "curvature": curvature,
        "tasks": description.tasks,
        "coverage": Coverage(description.units, description.rows),
        "method": description.method,
        "likelihood": description.likelihood.likelihood(),
        "exclude": description.exclude,
        "examples": description.examples,
        "calibration": description.calibration,
        "forward": unknown_forward if description.forward else None,
    }


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _is_consistent(unit: Unit) -> bool:
    """Whether a unit has the parts, and a shape, that its kind has."""
    groups, rows, columns = unit.shape
    kinds = {"norm": (groups, 1, 2), "unmerged": (groups, 1, 4), "free": (1, 1, columns), "linear": (1, rows, columns)}
    parts = [unit.weight is not None, unit.norm is not None, unit.convolution is not None, unit.bias is not None]
    if unit.shape != kinds.get(unit.kind, unit.shape) or unit.calls < 1:
        return False
    if unit.kind in ("norm", "unmerged"):
        return parts == [False, True, False, False]
    if unit.kind == "free":
        return parts == [True, False, False, False]
    if unit.weight is None or (unit.kind == "conv") != (unit.convolution is not None) or columns < unit.homogeneous:
        return False
    if unit.convolution is None:
        return True
    geometry = unit.convolution
    sizes = {len(getattr(geometry, field.name)) for field in fields(Convolution)}
    positive = min(*geometry.kernel, *geometry.stride, *geometry.dilation, 1) == 1
    return len(sizes) == 1 and positive and (columns - unit.homogeneous) % math.prod(geometry.kernel) == 0


def _tensors(description: Description, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Curvature]:
    """Return the anchor and the curvature of a file, every unit having both, and every tensor a unit."""
    left = dict(tensors)
    anchor = {unit.name: left.pop(f"anchor/{unit.name}") for unit in description.units}
    _check_dtypes(anchor.values(), left)
    shapes = {unit.name: unit.shape for unit in description.units}
    members: tuple[str, ...] = ()
    joint = None
    if description.joint is not None:
        members, joint = description.joint.units, _joint(description.joint, shapes, _taken("joint", left))
    _need(sorted([*description.blocks, *members]) == sorted(shapes), "its blocks are not those of its units")
    blocks = {
        name: _block(f"unit '{name}'", BLOCKS[kind], shapes[name], _taken(f"curvature/{name}", left))
        for name, kind in description.blocks.items()
    }
    _need(not left, f"its tensor '{next(iter(left), '')}' belongs to no unit")
    for unit in description.units:
        _need(tuple(anchor[unit.name].shape) == unit.shape, f"unit '{unit.name}' is of another shape than its tensors")
        spreads = anchor[unit.name][..., 3:] if unit.kind == "unmerged" else anchor[unit.name][..., :0]
        _need(not bool((spreads <= 0).any()), f"a sigma of unit '{unit.name}' is not positive")
    return anchor, Curvature(blocks, joint, members)


def _check_dtypes(anchor: Iterable[Tensor], curvature: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all is of the dtypes that `Memory.save` writes together."""
    dtypes = {tensor.dtype for name, tensor in curvature.items() if not name.endswith(_DIAGONAL)}
    if torch.int16 in dtypes:  # correlations, beside which all else is bfloat16
        dtypes = dtypes - {torch.int16} | {torch.bfloat16}
    for dtype in dtypes:
        _need(len(dtypes) == 1 and dtype in STORED, "its curvature is of several dtypes, or of one that none has")
        exact = torch.promote_types(dtype, torch.float32)
        _need(all(tensor.dtype is exact for tensor in anchor), "its anchor is of another dtype than its curvature")


def _taken(prefix: str, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a block by their own names, and take them from those that are left."""
    names = [name for name in left if name.rpartition("/")[0] == prefix]
    return {name.rpartition("/")[2]: left.pop(name) for name in names}


def _joint(entry: Joint, shapes: Mapping[str, Shape], parts: Mapping[str, Tensor]) -> KhatriRao:
    members = entry.units
    _need(bool(members) and len(set(members)) == len(members), "its units across layers are none, or named twice")
    wanted = [(1, rows, columns) for rows, columns in zip(entry.rows, entry.columns, strict=True)]
    what = "the factors across layers"
    _need([shapes[name] for name in members] == wanted, f"{what} are of another size than their units")
    factors = _factors(what, (1, sum(entry.rows), sum(entry.columns)), parts)
    return khatri_rao(factors, entry.rows, entry.columns)


def _block(what: str, kind: type[Block], shape: Shape, parts: Mapping[str, Tensor]) -> Block:
    """Return a block from a file's tensors, in float32 at least: the inverse of `packed`."""
    if kind is Kronecker:
        return assemble(Kronecker, _factors(f"the factors of {what}", shape, parts))
    groups, rows, columns = shape
    wanted: dict[str, tuple[int, ...]] = {"values": shape}
    if kind is Corrected:
        wanted = {"left": (groups, columns, columns), "right": (groups, rows, rows), "scales": shape}
        wanted |= {"left_values": (groups, columns), "right_values": (groups, rows)}
    _need({part: tuple(tensor.shape) for part, tensor in parts.items()} == wanted, f"{what} is of another shape")
    wide = {part: _wide(tensor) for part, tensor in parts.items()}
    for part, tensor in wide.items():
        if part in ("left", "right"):
            _need(_is_orthogonal(tensor), f"the eigenvectors of {what} are none")
        else:
            _need(not bool((tensor < 0).any()), f"the curvature of {what} is negative")
    return assemble(kind, wide)


def _factors(what: str, shape: Shape, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors of Kronecker products by name, their number, sizes and signs checked."""
    groups, rows, columns = shape
    sides: tuple[list[Tensor], list[Tensor]] = [], []
    factors: dict[str, Tensor] = {}
    matrices = [part for part in parts if not part.endswith(_DIAGONAL)]
    for term in range(max(len(matrices) // 2, 1)):
        left = "root" if f"root.{term}" in parts else "left"
        for side, kind, size in zip(sides, (left, "right"), (columns, rows), strict=True):
            part = f"{kind}.{term}"
            one, root = parts[part], kind == "root"
            wanted = (groups, one.shape[1], size) if root else (groups, size * (size + 1) // 2)
            _need(tuple(one.shape) == wanted and wanted[1] > 0, f"{what} are of another size than their units")
            factors[part] = _wide(one) if root else _symmetric(what, part, parts)
            side.append(factors[part])
    read = len(factors) + sum(parts[part].dtype is torch.int16 for part in factors)
    _need(read == len(parts), f"{what} have a part too many")
    for side in sides:
        _need(_are_positive(side), f"{what} are not positive semi-definite")
    return factors


def _wide(tensor: Tensor) -> Tensor:
    _need(tensor.is_floating_point(), "its curvature has whole numbers where there are none")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _symmetric(what: str, part: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a factor from its triangle, of itself or of its correlations."""
    packed = parts[part]
    if packed.dtype is torch.int16:
        diagonal = parts[part + _DIAGONAL]
        fits = diagonal.dtype is torch.float32 and tuple(diagonal.shape) == (len(packed), size_of(packed))
        _need(fits and not bool((diagonal < 0).any()), f"{what} have a diagonal that is none")
        return storage.from_correlations(packed, diagonal)
    _need(packed.dtype is not torch.bfloat16, f"{what} are rounded, so that they may not be positive")
    return symmetric(_wide(packed))


def _are_positive(factors: Sequence[Tensor]) -> bool:
    """Whether matrices [groups, F, F] of one block may be positive semi-definite, by what is seen at little cost.

    No number of such a matrix is larger than the largest on its diagonal, of which none is negative; up to rounding,
    which goes by the largest factor. Tensors that are not square are roots. Numbers that are not finite are another
    fault.
    """
    square = [factor.shape[1] == factor.shape[2] for factor in factors]
    sizes = [
        float(f.abs().amax()) ** (1 if whole else 2) for f, whole in zip(factors, square, strict=True) if f.numel()
    ]
    slack = _ROUGHLY * max(sizes, default=0.0)
    for matrix in (factor for factor, whole in zip(factors, square, strict=True) if whole and factor.numel()):
        diagonal = matrix.diagonal(dim1=1, dim2=2)
        if float(diagonal.min()) < -slack or float((matrix.abs().amax((1, 2)) - diagonal.amax(1)).max()) > slack:
            return False
    return True


def _is_orthogonal(matrix: Tensor) -> bool:
    """Whether matrices [groups, F, F] keep the length of a vector, in both directions, up to rounding."""
    vector = torch.randn(matrix.shape[-1], generator=torch.Generator().manual_seed(0)).to(matrix.dtype)
    lengths = torch.cat([(matrix @ vector).norm(dim=-1), (matrix.mT @ vector).norm(dim=-1)])
    return not bool(((lengths - vector.norm()).abs() > 5 * _ROUGHLY * vector.norm()).any())


class _Unknown(Likelihood):
    """Stands for a user's likelihood that a file can only name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: Any) -> NoReturn:
        likelihood = f"the memory was made with the likelihood '{self.name}'"
        raise XkfacError(f"{likelihood}, which its file cannot hold; pass likelihood=... again")

    predictions = sample = nll = root = _refuse  # type: ignore[assignment]
