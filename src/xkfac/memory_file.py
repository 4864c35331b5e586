"""What a memory file says: its description and its tensors, both ways, every field checked when it is read.

A digest tells damage, not intent: a file can be made to say anything. So every word has its type and range, every
tensor its shape and, as far as that can be seen at little cost, its values; and no tensor is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from xkfac import files as storage
from xkfac.calibration import Calibration, CurvePoint
from xkfac.curvature.blocks import (
    Block,
    Corrected,
    Diagonal,
    KhatriRao,
    Kronecker,
    assemble,
    khatri_rao,
    parts,
    symmetrised,
)
from xkfac.curvature.gram import size_of, symmetric, triangle
from xkfac.curvature.operator import Curvature, Settings
from xkfac.errors import XkfacError
from xkfac.methods import Method
from xkfac.model.batches import unknown_forward
from xkfac.model.likelihood import LIKELIHOODS, Likelihood
from xkfac.model.tracing import Convolution
from xkfac.model.units import Coverage, Kind, Row, Unit

BLOCKS: dict[str, type[Block]] = {"kronecker": Kronecker, "diagonal": Diagonal, "corrected": Corrected}
STORED = (torch.float32, torch.bfloat16, torch.float64)

_GONE = [("basis", "gradients"), ("rounded", False)]
_DIAGONAL = ".diagonal"  # in a name: the diagonal that goes with correlations
_ROUGHLY = 1e-2  # of the largest number: what rounding, to bfloat16 too, may do to a factor

Shape = tuple[int, int, int]
Check = Callable[[Any], bool]


def packed(prefix: str, block: Block | KhatriRao, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a block's tensors for a file: factors of Kronecker products as triangles, for bfloat16 as correlations."""
    found = {}
    for part, tensor in parts(block).items():
        name = f"{prefix}/{part}"
        if not _is_factor(type(block), part):
            found[name] = tensor.to(dtype)
        elif dtype is torch.bfloat16:
            found[name], found[name + _DIAGONAL] = storage.correlations(tensor)
        else:
            found[name] = triangle(tensor).to(dtype)
    return found


def named(likelihood: Likelihood) -> dict[str, Any]:
    """Return a likelihood's entry in a file; arguments are None for a user's own, which the file can only name."""
    if LIKELIHOODS.get(likelihood.name) is not type(likelihood):
        return {"name": likelihood.name, "arguments": None}
    return {"name": likelihood.name, "arguments": {key: float(value) for key, value in likelihood.arguments.items()}}


def rebuilt(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of the memory that a file describes, by name.

    Raises ValueError, LookupError or TypeError where the description is none, or does not describe the tensors.
    """
    for key in ("tasks", "examples", "exclude", "roots", "units", "method", "rows", "likelihood", "blocks", "joint"):
        _need(key in description, f"it has no '{key}'")
    _need(_is_whole(description["tasks"], 1), "its number of tasks is none")
    _need(_is_whole(description["examples"]), "its number of examples is none")
    _need(_is_list(description["exclude"], _is_text), "its excluded patterns are no texts")
    _need(isinstance(description["roots"], bool), "'roots' is neither true nor false")
    units = tuple(_unit(entry) for entry in _listed(description["units"], "units"))
    method = _method(description["method"])
    _need(len({unit.name for unit in units}) == len(units), "two units have one name")
    parts = [part for unit in units for part in (unit.weight, unit.bias, unit.norm) if part is not None]
    _need(len(set(parts)) == len(parts), "two units have a part in common")
    _need(method.penalised or not units, f"method '{method.name}' has no units, and there are some")
    anchor, curvature = _tensors(description, units, tensors)
    calibration = description.get("calibration")  # older files have neither this key nor the next
    forward = description.get("forward", False)
    _need(isinstance(forward, bool), "'forward' is neither true nor false")
    return {
        "anchor": anchor,
        "curvature": curvature,
        "tasks": description["tasks"],
        "coverage": Coverage(units, tuple(_rows(description["rows"], units))),
        "method": method,
        "likelihood": _likelihood(description["likelihood"]),
        "exclude": tuple(description["exclude"]),
        "examples": description["examples"],
        "calibration": None if calibration is None else _calibration(calibration),
        "forward": unknown_forward if forward else None,
    }


def _need(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _is_whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_number(value: Any) -> bool:
    return (type(value) is float and not math.isnan(value)) or (type(value) is int and abs(value) < 2**63)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_list(value: Any, check: Check, length: int | None = None) -> bool:
    return isinstance(value, list) and len(value) == (length or len(value)) and all(map(check, value))


def _listed(value: Any, what: str) -> list[Any]:
    _need(isinstance(value, list), f"its {what} are no list")
    listed: list[Any] = value
    return listed


def _checked(entry: Any, what: str, of: type[Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return an entry of a description: known fields, none missing that has no default, each passing its check."""
    _need(isinstance(entry, dict), f"{what} is no table")
    known = {field.name: field for field in fields(of)}
    for key in dict.fromkeys([*known, *entry]):
        _need(key in known, f"{what} has the unknown field '{key}'")
        if key in entry:
            _need(checks.get(key, lambda _: True)(entry[key]), f"'{key}' of {what} is {entry[key]!r:.100}")
        else:
            given = known[key].default is not MISSING or known[key].default_factory is not MISSING
            _need(given, f"{what} has no '{key}'")
    return dict(entry)


_UNIT: dict[str, Check] = {
    "name": _is_text,
    "kind": lambda value: value in get_args(Kind),
    "shape": lambda value: _is_list(value, _is_whole, 3),
    "weight": _is_name,
    "bias": _is_name,
    "norm": _is_name,
    "calls": lambda value: _is_whole(value, 1),
}
_CONVOLUTION: dict[str, Check] = {
    **dict.fromkeys(("kernel", "stride", "dilation"), lambda value: _is_list(value, lambda one: _is_whole(one, 1))),
    "padding": lambda value: _is_list(value, lambda pair: _is_list(pair, _is_whole, 2)),
}
_ROW: dict[str, Check] = {**dict.fromkeys(("parameter", "unit", "kind", "note"), _is_text), "size": _is_whole}


def _unit(entry: Any) -> Unit:
    given = _checked(entry, "a unit", Unit, _UNIT)
    convolution = given.pop("convolution", None)
    if convolution is not None:
        geometry = _checked(convolution, f"the convolution of unit '{given['name']}'", Convolution, _CONVOLUTION)
        padding = tuple(tuple(pair) for pair in geometry.pop("padding"))
        convolution = Convolution(padding=padding, **{name: tuple(value) for name, value in geometry.items()})
    unit = Unit(**{**given, "shape": tuple(given["shape"]), "convolution": convolution})
    _need(_is_consistent(unit), f"unit '{unit.name}' is of no kind that there is")
    return unit


def _is_consistent(unit: Unit) -> bool:
    """Whether a unit has the parts, and a shape, that its kind has."""
    groups, rows, columns = unit.shape
    kinds = {"norm": (groups, 1, 2), "unmerged": (groups, 1, 4), "free": (1, 1, columns), "linear": (1, rows, columns)}
    parts = [unit.weight is not None, unit.norm is not None, unit.convolution is not None, unit.bias is not None]
    if unit.shape != kinds.get(unit.kind, unit.shape):
        return False
    if unit.kind in ("norm", "unmerged"):
        return parts == [False, True, False, False]
    if unit.kind == "free":
        return parts == [True, False, False, False]
    if unit.weight is None or (unit.kind == "conv") != (unit.convolution is not None) or columns < unit.homogeneous:
        return False
    if unit.convolution is None:
        return True
    sizes = {len(getattr(unit.convolution, field.name)) for field in fields(Convolution)}
    return len(sizes) == 1 and (columns - unit.homogeneous) % math.prod(unit.convolution.kernel) == 0


def _rows(entries: Any, units: Iterable[Unit]) -> Iterator[Row]:
    known = {"-", *(unit.name for unit in units)}
    for entry in _listed(entries, "rows"):
        row = Row(**_checked(entry, "a row", Row, _ROW))
        _need(row.unit in known, f"the row of '{row.parameter}' is of no unit that there is")
        yield row


def _method(entry: Any) -> Method:
    if isinstance(entry, dict) and isinstance(entry.get("units"), bool):  # as files from before say it
        entry = {**{key: value for key, value in entry.items() if key != "units"}, "per_parameter": not entry["units"]}
    given = _checked(entry, "the method", Method, {"name": _is_text, "interpretation": _is_text})
    whole = {"draws": lambda value: value is None or _is_whole(value, 1)}
    inner = given.pop("settings", None)
    if isinstance(inner, dict):  # what files from before say of options that are gone, where it is what there is now
        inner = {key: value for key, value in inner.items() if (key, value) not in _GONE}
    settings = _checked(inner, "the method's settings", Settings, whole)
    return Method(settings=Settings(**settings), **given)


def _calibration(entry: Any) -> Calibration:
    checks: dict[str, Check] = {"scale": _is_number, "radius": _is_number, "examples": _is_whole}
    checks["scales"] = lambda value: _is_list(value, _is_number)
    given = _checked(entry, "the calibration", Calibration, checks)
    for point in _listed(given["curve"], "points of the calibration"):
        of_point = dict.fromkeys(("predicted", "real"), _is_number)
        numbers = _checked(point, "a point of the calibration", CurvePoint, of_point)
        _need(numbers["predicted"] >= 0, "a point of the calibration has a negative penalty")
    return Calibration.read(entry)


def _likelihood(entry: Any) -> Likelihood:
    _need(isinstance(entry, dict) and set(entry) == {"name", "arguments"}, "its likelihood is none")
    name, arguments = entry["name"], entry["arguments"]
    _need(_is_text(name), "its likelihood has no name")
    if arguments is None:
        return _Unknown(name)
    numbers = isinstance(arguments, dict) and all(map(_is_number, arguments.values()))
    _need(numbers and all(map(math.isfinite, arguments.values())), "arguments of its likelihood are no finite numbers")
    return LIKELIHOODS[name](**arguments)


def _tensors(
    description: Mapping[str, Any], units: Sequence[Unit], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Curvature]:
    """Return the anchor and the curvature of a file, every unit having both, and every tensor a unit."""
    left = dict(tensors)
    anchor = {unit.name: left.pop(f"anchor/{unit.name}") for unit in units}
    _check_dtypes(anchor.values(), left, description["roots"])
    shapes = {unit.name: unit.shape for unit in units}
    kinds, entry = description["blocks"], description["joint"]
    _need(isinstance(kinds, dict), "its blocks are no table")
    members: tuple[str, ...] = ()
    joint = None
    if entry is not None:
        members, joint = _joint(entry, shapes, _taken("joint", left), description["roots"])
    _need(sorted([*kinds, *members]) == sorted(shapes), "its blocks are not those of its units")
    blocks = {}
    for name, kind in kinds.items():
        parts = _taken(f"curvature/{name}", left)
        blocks[name] = _block(f"unit '{name}'", BLOCKS[kind], shapes[name], parts, description["roots"])
    _need(not left, f"its tensor '{next(iter(left), '')}' belongs to no unit")
    for unit in units:
        found = tuple(anchor[unit.name].shape)
        _need(found == unit.shape, f"unit '{unit.name}' is of another shape than its tensors")
        spreads = anchor[unit.name][..., 3:] if unit.kind == "unmerged" else anchor[unit.name][..., :0]
        _need(not bool((spreads <= 0).any()), f"a sigma of unit '{unit.name}' is not positive")
    return anchor, Curvature(blocks, joint, members)


def _check_dtypes(anchor: Iterable[Tensor], curvature: Mapping[str, Tensor], roots: bool) -> None:
    """Raise ValueError unless all is of the dtypes that `Memory.save` writes together."""
    found = {tensor.dtype for name, tensor in curvature.items() if not name.endswith(_DIAGONAL)}
    if torch.int16 in found and not roots:  # correlations, beside which all else is bfloat16
        found = found - {torch.int16} | {torch.bfloat16}
    for dtype in found:
        _need(len(found) == 1 and dtype in STORED, "its curvature is of several dtypes, or of one that none has")
        _need(not roots or dtype is torch.bfloat16, "'roots' does not go with the dtype of its curvature")
        exact = torch.promote_types(dtype, torch.float32)
        _need(all(tensor.dtype is exact for tensor in anchor), "its anchor is of another dtype than its curvature")


def _taken(prefix: str, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a block by their own names, and take them from those that are left."""
    names = [name for name in left if name.rpartition("/")[0] == prefix]
    return {name.rpartition("/")[2]: left.pop(name) for name in names}


def _joint(
    entry: Any, shapes: Mapping[str, Shape], parts: Mapping[str, Tensor], roots: bool
) -> tuple[tuple[str, ...], KhatriRao]:
    _need(isinstance(entry, dict) and set(entry) == {"units", "rows", "columns"}, "its factors across layers are none")
    members = _listed(entry["units"], "units across layers")
    _need(bool(members) and len(set(members)) == len(members), "its units across layers are none, or named twice")
    wanted = [(1, rows, columns) for rows, columns in zip(entry["rows"], entry["columns"], strict=True)]
    what = "the factors across layers"
    _need([shapes[name] for name in members] == wanted, f"{what} are of another size than their units")
    shape = 1, sum(entry["rows"]), sum(entry["columns"])
    named = _factors(what, shape, parts, roots)
    return tuple(members), khatri_rao(named, entry["rows"], entry["columns"])


def _block(what: str, kind: type[Block], shape: Shape, parts: Mapping[str, Tensor], roots: bool) -> Block:
    """Return a block from a file's tensors, in float32 at least: the inverse of `packed`."""
    if kind is Kronecker:
        return assemble(Kronecker, _factors(f"the factors of {what}", shape, parts, roots))
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


def _factors(what: str, shape: Shape, parts: Mapping[str, Tensor], roots: bool) -> dict[str, Tensor]:
    """Return the factors of Kronecker products by name, their number, sizes and signs checked."""
    groups, rows, columns = shape
    sides: tuple[list[Tensor], list[Tensor]] = [], []
    found: dict[str, Tensor] = {}
    matrices = [part for part in parts if not part.endswith(_DIAGONAL)]
    for term in range(max(len(matrices) // 2, 1)):
        left = "root" if f"root.{term}" in parts else "left"
        for side, kind, size in zip(sides, (left, "right"), (columns, rows), strict=True):
            part = f"{kind}.{term}"
            one, root = parts[part], kind == "root"
            wanted = (groups, one.shape[1], size) if root else (groups, size * (size + 1) // 2)
            _need(tuple(one.shape) == wanted and wanted[1] > 0, f"{what} are of another size than their units")
            found[part] = _wide(one) if root else _symmetric(what, part, parts, roots)
            side.append(found[part])
    read = len(found) + sum(parts[part].dtype is torch.int16 for part in found)
    _need(read == len(parts), f"{what} have a part too many")
    for side in sides:
        _need(_are_positive(side), f"{what} are not positive semi-definite")
    return found


def _wide(tensor: Tensor) -> Tensor:
    _need(tensor.is_floating_point(), "its curvature has whole numbers where there are none")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _symmetric(what: str, part: str, parts: Mapping[str, Tensor], roots: bool) -> Tensor:
    """Return a factor from its triangle: of itself, of its correlations, or of its root as in older files."""
    packed = parts[part]
    if packed.dtype is torch.int16:
        diagonal = parts[part + _DIAGONAL]
        fits = diagonal.dtype is torch.float32 and tuple(diagonal.shape) == (len(packed), size_of(packed))
        _need(fits and not bool((diagonal < 0).any()), f"{what} have a diagonal that is none")
        return storage.from_correlations(packed, diagonal)
    _need(roots or packed.dtype is not torch.bfloat16, f"{what} are rounded, so that they may not be positive")
    matrix = symmetric(_wide(packed))
    return symmetrised(matrix.tril() @ matrix.tril().mT) if roots else matrix


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


def _is_factor(block: type[Block] | type[KhatriRao], part: str) -> bool:
    """Whether a part of a block is a symmetric matrix, which a file holds as a triangle."""
    return block in (Kronecker, KhatriRao) and not part.startswith("root")


class _Unknown(Likelihood):
    """Stands for a user's likelihood that a file can only name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _refuse(self, *_: Any) -> NoReturn:
        likelihood = f"the memory was made with the likelihood '{self.name}'"
        raise XkfacError(f"{likelihood}, which its file cannot hold; pass likelihood=... again")

    predictions = sample = nll = root = _refuse  # type: ignore[assignment]
