"""The tree in docs/architecture.md: it has every module once; packages and modules import from those above alone."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "xkfac"
MOST_MODULES, MOST_LINES = 15, 410


def listed():
    """Return the paths of modules below src/xkfac in the order of the tree."""
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    found, package = [], ""
    for line in tree.splitlines()[2:]:
        if not line.startswith("    "):
            package = ""
        if folder := re.match(r"  ([\w/]+/) ", line):
            package = folder[1]
            continue
        found.append(package + re.match(r"\s+([\w.]+)  ", line)[1])
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


def package_of(path):
    """Return the package of a module; a module outside of packages stands for itself."""
    folder = str(Path(path).parent)
    return path if folder in (".", "experiments") else folder


def test_the_tree_has_every_module_once():
    modules = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    found = listed()
    assert len(found) == len(set(found))
    assert set(found) == modules


def test_modules_import_from_those_above_them():
    places = {path: place for place, path in enumerate(listed())}
    upwards = [(path, other) for path in places for other in imported(path) if places[other] >= places[path]]
    assert upwards == []
    assert ("learning/learner.py", "memory.py") in {(path, other) for path in places for other in imported(path)}


def test_packages_point_one_way():
    order = {name: place for place, name in enumerate(dict.fromkeys(package_of(path) for path in listed()))}
    edges = {(package_of(path), package_of(other)) for path in listed() for other in imported(path)}
    assert [(one, other) for one, other in edges if order[other] > order[one]] == []
    assert ("penalty", "curvature") in edges


def test_no_package_is_a_corridor_and_no_module_a_hall():
    packages = [path.parent for path in SOURCE.rglob("__init__.py")]
    crowded = {str(p.relative_to(SOURCE)): n for p in packages if (n := len(list(p.glob("*.py"))) - 1) > MOST_MODULES}
    assert crowded == {}
    lengths = {
        str(p.relative_to(SOURCE)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE.rglob("*.py")
    }
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}
    for package in packages:
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))


def test_what_the_page_names_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[2]
    modules = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".html")]
    for entry in re.split(r"\n- |;|\n\n", text[text.index("Where things are") : text.index("Tests mirror")]):
        named = re.findall(r"`([\w./]+)`", entry)
        files = [path for name in named for path in modules if f"/{path.relative_to(SOURCE)}".endswith(f"/{name}")]
        assert len(files) == sum(name.endswith((".py", ".html")) for name in named), entry
        code = "\n".join(path.read_text(encoding="utf-8") for path in files)
        for name in named:
            if name.isidentifier():
                assert re.search(rf"^\s*(class |def )?{name}\b", code, re.MULTILINE), name
