"""Test the library with the lowest versions that pyproject.toml accepts: make lowest.

Downloads torch, so it is no part of `make test`. Needs the standard library alone, and a Python of the lowest version.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/test_memory.py", "tests/test_files.py", "tests/test_readme.py", "tests/test_pretrained.py")
TESTS += (
    "tests/learning/test_learner.py",
    "tests/experiments/recipes/test_recipe.py",
    "tests/packaging/test_metadata.py",
)


def lowest(extras=("experiments",)):
    """Return the lowest version of every package that the library and some extras name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    found = (re.match(r"([\w-]+)>=([\d.]+)", one) for one in wanted)
    return {match[1]: match[2] for match in found if match}


def tools():
    """Return the packages that run the tests, as constraints.txt pins them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if re.match(r"(pytest|hypothesis|pyyaml)==", line)] + ["pyyaml"]


def main():
    """Make an environment of the lowest versions and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VERSION", help="take another version instead")
    versions = {**lowest(), **dict(one.split("=") for one in parser.parse_args().set)}
    print(" ".join(f"{name}=={version}" for name, version in versions.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pinned = [f"{name}=={version}" for name, version in versions.items()]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *pinned, *tools()], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", ROOT], check=True)
        tests = [python, "-m", "pytest", "-x", "-p", "no:cacheprovider", *TESTS]
        raise SystemExit(subprocess.run(tests, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
