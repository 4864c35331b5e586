"""What the package says of itself: one version, in one place, and a reference to the paper."""

import ast
import tomllib
from pathlib import Path

import yaml

import xkfac

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_written_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source == ROOT / "src" / "xkfac" / "__init__.py"
    body = ast.parse(source.read_text(encoding="utf-8")).body
    versions = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]
    ]
    assert versions == [xkfac.__version__]  # a literal, which the build reads without importing torch


def test_the_changelog_has_an_entry_for_the_version():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    assert f"## {xkfac.__version__}" in headings


def test_the_library_needs_torch_and_safetensors_alone():
    names = {requirement.partition(">=")[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "safetensors"}


def test_the_citation_names_the_software_and_prefers_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    about = PROJECT["project"]
    assert (citation["type"], citation["title"], citation["license"]) == ("software", about["name"], about["license"])
    assert citation["abstract"] == about["description"]
    assert citation["authors"] == about["authors"]
    assert citation["keywords"] == about["keywords"]
    paper = citation["preferred-citation"]
    assert paper["title"] == "Continual Learning with Extended Kronecker-factored Approximate Curvature"
    assert [author["family-names"] for author in paper["authors"]] == ["Lee", "Hong", "Joo", "Kim"]
    assert (paper["collection-title"], paper["year"]) == ("CVPR", 2020)
