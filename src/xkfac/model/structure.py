"""Is a network made of the units that a memory knows? What a pass found is compared with what the memory holds."""

from collections.abc import Iterable
from dataclasses import fields

from xkfac.errors import MismatchError, UnitError
from xkfac.model.patterns import matches
from xkfac.model.tracing import Convolution
from xkfac.model.units import UNSEEN, Coverage, Row, Unit

_RESTORE = "restore the network that the memory was made from, or make the memory again"
_GEOMETRY = fields(Convolution)


def check_structure(before: Coverage, now: Coverage, examples: int = 0) -> None:
    """Compare the units of a memory with those that a forward pass has shown, on a batch of so many examples if known.

    Units that are new, and those that are left out now, are no difference.

    Raises MismatchError for the first unit that is another one now, or is no longer used.
    """
    known = {unit.name: unit for unit in now.units}
    rows = {row.parameter: row for row in now.rows}
    for unit in before.units:
        new = known.get(unit.name)
        if new is not None and _structure(unit) == _structure(new):
            continue
        old_rows = [row for row in before.rows if row.unit == unit.name]
        new_rows = [rows[row.parameter] for row in old_rows if row.parameter in rows]
        if old_rows and all(row.unit == "-" for row in new_rows):
            continue
        unseen = [all(row.note == UNSEEN for row in these) and bool(these) for these in (old_rows, new_rows)]
        if new is None and True in unseen:
            raise _head(unit, unused_now=unseen[1])
        if new is None:
            owners = {row.unit for row in new_rows}
            new = next((one for one in now.units if one.name in owners), None)
        raise MismatchError(_difference(unit, new, now, examples))


def _structure(unit: Unit) -> tuple[object, ...]:
    return unit.kind, unit.shape, unit.weight, unit.bias, unit.norm, unit.convolution


def _head(unit: Unit, *, unused_now: bool) -> MismatchError:
    layer = unit.weight.rpartition(".")[0] if unit.kind == "free" and unit.weight else unit.name
    what = "is in the memory, and this task's forward pass does not use it"
    if not unused_now:
        what = "is used by this task's forward pass, and was in the memory without being used"
    return MismatchError(
        f"'{layer or unit.name}' {what}; if every task has a head of its own, leave heads out of the memory, with "
        f"memory.without('{layer or unit.name}') or consolidate(..., exclude=['{layer or unit.name}'])"
    )


def _difference(old: Unit, new: Unit | None, now: Coverage, examples: int) -> str:
    """Return the sentence that says how a unit differs, and the remedy."""
    if new is None:
        return f"the network has no unit '{old.name}' any more; {_RESTORE}"
    if "free" in (old.kind, new.kind) and old.kind != new.kind:
        return _free_difference(old, new, now, examples)
    start = f"unit '{old.name}'"
    if old.name != new.name:
        return f"{start} of the memory is part of unit '{new.name}' now; exclude the same layers as before"
    if old.norm != new.norm:
        return f"{start} is {_behind(new)} now and was {_behind(old)} in the memory; {_RESTORE}"
    if old.convolution is not None and new.convolution is not None and old.convolution != new.convolution:
        pairs = ((f.name, getattr(old.convolution, f.name), getattr(new.convolution, f.name)) for f in _GEOMETRY)
        name, was, is_now = next((name, _plain(a), _plain(b)) for name, a, b in pairs if a != b)
        return f"{start} is a convolution with {name} {is_now} now and with {was} in the memory; {_RESTORE}"
    return f"{start} is {_described(new)} now and was {_described(old)} in the memory; {_RESTORE}"


def _free_difference(old: Unit, new: Unit, now: Coverage, examples: int) -> str:
    """Say why a layer has become a free parameter, or a free parameter a layer."""
    weight = (old if new.kind == "free" else new).weight or ""
    rows = now.input_rows.get(weight)
    if new.kind == "free":
        start = f"unit '{old.name}' is a layer in the memory and a free parameter now"
        if rows is None or not examples or rows == examples:
            return f"{start}, since its weight is transformed, shared or used otherwise than by one layer; {_RESTORE}"
        return (
            f"{start}, since its input has {rows} rows for a batch of {examples} examples; give inputs of the size "
            "that the memory was made with, or make the memory again with batches of another size"
        )
    start = f"'{weight}' is a free parameter in the memory and the weight of a layer now"
    if rows is None or not examples:
        return f"{start}; {_RESTORE}"
    return (
        f"{start}, since its input has {rows} rows, as many as the batch has examples; use batches of another size if "
        f"that is by chance, as where a sequence is as long as the batch is large, else {_RESTORE}"
    )


def _plain(values: tuple[object, ...]) -> str:
    """Return the values of a geometry as text: (2, 2) as 2x2, padding by its two sides where these differ."""
    sides = [value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value for value in values]
    return "x".join(str(side) for side in sides)


def _behind(unit: Unit) -> str:
    return "without a BN behind it" if unit.norm is None else f"merged with '{unit.norm}'"


def _described(unit: Unit) -> str:
    return f"{unit.kind} {list(unit.shape)}" + (f" with '{unit.norm}'" if unit.norm is not None else "")


def leave_out(coverage: Coverage, patterns: Iterable[str]) -> tuple[set[str], Coverage]:
    """Return the names of the units whose parameters some patterns match, and the coverage without them.

    A pattern names parameters, modules (all their parameters), or several of these, such as "head*".

    Raises UnitError for a pattern that matches no unit, or a part of one alone.
    """
    matched: set[str] = set()
    for pattern in patterns:
        hits = {row.parameter for row in coverage.rows if row.unit != "-" and matches(row.parameter, pattern)}
        if not hits:
            raise UnitError(f"'{pattern}' matches no parameter that the memory covers; see memory.summary()")
        matched |= hits
    left_out = {row.unit for row in coverage.rows if row.parameter in matched}
    for row in coverage.rows:
        if row.unit in left_out and row.parameter not in matched:
            raise UnitError(f"'{row.parameter}' is in unit '{row.unit}' with what is left out; leave it out too")
    units = tuple(unit for unit in coverage.units if unit.name not in left_out)
    rows = (row if row.unit not in left_out else Row(row.parameter, "-", "excluded", row.size) for row in coverage.rows)
    return left_out, Coverage(units, tuple(rows))
