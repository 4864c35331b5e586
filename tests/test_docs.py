"""The pages say what is there. The strict build of the site checks the links between them; nothing is built here."""

import ast
import re
from pathlib import Path

import pytest

import xkfac

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]


def slug(heading):
    """Return the anchor that the site, and viewers of repositories, give to a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


def test_the_reference_has_every_public_name_once_in_order():
    names = re.findall(r"^::: xkfac\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert names == list(xkfac.__all__)


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), link


def test_equations_are_where_the_mathematics_page_says():
    table = (DOCS / "mathematics.md").read_text().split("## One backward pass")[0]
    modules = re.findall(r"`((?:model|curvature|penalty|learning)/\w+)`", table)
    assert len(modules) >= 8
    assert [m for m in modules if not (ROOT / "src" / "xkfac" / f"{m}.py").is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_in_python_parse_and_use_public_names(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "xkfac":
                assert node.attr in xkfac.__all__, f"xkfac.{node.attr} is not public"
