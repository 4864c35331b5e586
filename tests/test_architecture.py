"""The tree in docs/architecture.md: it has every module once, and each imports only from those above it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "xkfac"


def listed():
    """Return the paths of modules below src/xkfac in the order of the tree."""
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    found, package = [], ""
    for line in tree.splitlines()[2:]:
        if not line.startswith("    "):
            package = ""
        if folder := re.match(r"  (\w+/)", line):
            package = folder[1]
            continue
        names = re.match(r"\s+((?:[\w.]+, )*[\w.]+)  ", line)[1]
        found += [package + name for name in names.split(", ") if name.endswith(".py")]
    return found


def imported(path):
    """Return the paths of the modules that one imports, inside functions too."""
    for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module.split(".")[0] != "xkfac":
            continue
        for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
            target = "/".join(module.split(".")[1:]) + ".py"
            if (SOURCE / target).is_file():
                yield target


def test_the_tree_has_every_module_once():
    modules = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    found = listed()
    assert len(found) == len(set(found))
    assert set(found) == modules


def test_modules_import_from_those_above_them():
    places = {path: place for place, path in enumerate(listed())}
    upwards = [(path, other) for path in places for other in imported(path) if places[other] >= places[path]]
    assert upwards == []
    assert ("learner.py", "memory.py") in {(path, other) for path in places for other in imported(path)}
