"""Names and patterns of parameters and layers that are left out."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from torch import nn

from xkfac.errors import UnitError, nearest
from xkfac.model.passes import norms_of


def as_patterns(exclude: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns of `exclude`, which may be a single one."""
    return (exclude,) if isinstance(exclude, str) else tuple(exclude)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a parameter or layer of this name, or one that it is part of."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


def _known(model: nn.Module) -> dict[str, str]:
    """Return the names that patterns can mean: of parameters, tied ones by their first name, and of BN layers."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    known = {name: first[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return known | {path: path for path in norms_of(model)}


def excluded_names(model: nn.Module, exclude: Iterable[str]) -> set[str]:
    """Return the parameters and BN layers that the patterns match.

    Raises UnitError that names all patterns which match nothing, with a suggestion for each.
    """
    known = _known(model)
    excluded: set[str] = set()
    unknown = []
    for pattern in as_patterns(exclude):
        hits = {known[name] for name in known if matches(name, pattern)}
        if not hits:
            near = nearest(pattern, [*dict(model.named_modules()), *known])
            unknown.append(f"'{pattern}' matches no parameter of the model{near}")
        excluded |= hits
    if unknown:
        raise UnitError(f"exclude: {'; '.join(unknown)}")
    return excluded


def _shared_start(names: Sequence[Sequence[str]]) -> list[str]:
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))]


def patterns_for(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return few patterns that exclude the layers of these paths and nothing else."""
    paths = list(paths)
    others = [name for name in _known(model) if not any(matches(name, path) for path in paths)]

    def means_others(pattern: str) -> bool:
        return any(matches(name, pattern) for name in others)

    names = [path.split(".") for path in paths]
    if len(paths) > 1:
        start, end = _shared_start(names), _shared_start([name[::-1] for name in names])[::-1]
        shortest = ".".join([*start, "*", *end])
        if len(start) + len(end) < min(map(len, names)) and not means_others(shortest):
            return [shortest]
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[re.sub(r"\b\d+\b", "*", path)].append(path)
    patterns = [same if len(same) == 1 or means_others(pattern) else [pattern] for pattern, same in groups.items()]
    return [pattern for some in patterns for pattern in some]
