"""The workflows of GitHub: they call what exists, pin their actions, and publish without a token."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.packaging.check_lowest import lowest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
NAMES = sorted(path.name for path in FOLDER.glob("*.yml"))


def text(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def jobs(name):
    return yaml.safe_load(text(name))["jobs"]


def triggers(name):
    return yaml.safe_load(text(name))[True]  # YAML 1.1 reads the key `on` as true


def steps(name):
    return [step for job in jobs(name).values() for step in job.get("steps", [])]


def commands(name):
    return "\n".join(step["run"] for step in steps(name) if "run" in step)


def supported():
    """Return the versions of Python that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project["classifiers"])
    return [match[1] for match in found if match]


def test_there_is_one_for_tests_docs_and_releases():
    assert NAMES == ["docs.yml", "release.yml", "tests.yml"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_workflow_calls_exists(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", commands(name))) <= targets
    for script in re.findall(r"\bpython (\S+\.py)", commands(name)):
        assert (ROOT / script).is_file()
    for job in jobs(name).values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(jobs(name))


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_major_version(name):
    used = re.findall(r"uses: (\S+)", text(name))
    assert used
    for action in used:
        if action.startswith("./"):
            assert (ROOT / action).is_file()
        else:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action), action


def test_tests_run_on_every_supported_python_on_linux_and_macos():
    matrix = jobs("tests.yml")["test"]["strategy"]["matrix"]
    assert matrix["python"] == supported() == ["3.11", "3.12", "3.13"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]
    assert "make test" in commands("tests.yml")
    assert jobs("release.yml")["check"]["strategy"]["matrix"]["python"] == supported()


def test_the_lowest_versions_are_tested_with_the_lowest_python():
    assert "make lowest" in commands("tests.yml")
    assert f'python-version: "{supported()[0]}"' in text("tests.yml")
    assert set(lowest()) >= {"torch", "safetensors", "matplotlib", "typer"}


def test_docs_are_built_always_and_published_on_tags():
    on = triggers("docs.yml")
    assert (on["push"], "pull_request" in on) == ({"branches": ["main"], "tags": ["v*"]}, True)
    assert "make docs" in commands("docs.yml")
    assert jobs("docs.yml")["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"


def test_a_tag_publishes_what_was_tested_without_a_token():
    assert triggers("release.yml") == {"push": {"tags": ["v*"]}}
    publish = jobs("release.yml")["publish"]
    assert publish["needs"] == ["test", "check"]
    assert publish["permissions"] == {"id-token": "write"}
    assert jobs("release.yml")["check"]["needs"] == "build"
    assert "secrets." not in text("release.yml")
    assert "password" not in text("release.yml")
