"""Build the wheel and use it in a clean environment, as people who install it do: make wheel.

Takes minutes and downloads torch, so it is no part of `make test`. Needs the standard library alone.
"""

import argparse
import email
import fnmatch
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARY_NEEDS = {"torch", "safetensors"}
REMEDY = "pip install 'xkfac[experiments]'"
# modules that importing the library must not need: numpy and those of the extra "experiments"
ABSENT = ("numpy", "matplotlib", "PIL", "rich", "scipy", "sklearn", "timm", "torchvision", "typer")
IMPORT = f"""
import importlib.util, importlib.metadata, pathlib, sys
present = [name for name in {ABSENT} if importlib.util.find_spec(name)]
assert not present, f"the environment is not clean, it has {{present}}"
import xkfac
assert pathlib.Path(xkfac.__file__).is_relative_to(sys.prefix), xkfac.__file__
assert xkfac.__version__ == importlib.metadata.version("xkfac"), xkfac.__version__
missing = [name for name in xkfac.__all__ if not hasattr(xkfac, name)]
assert not missing, f"names of __all__ that are missing: {{missing}}"
print(xkfac.__version__)
"""


def run(*command, folder=None, fails=False):
    """Run a command and return what it prints, on stderr if it is expected to fail; complain if it ends otherwise."""
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False)
    if (done.returncode != 0) is not fails:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return (done.stderr if fails else done.stdout).strip()


def expect(holds, sentence, instead=""):
    """Print a sentence that holds; end with one that does not, and with what was found instead."""
    if not holds:
        raise SystemExit(f"FAILED: {sentence} {instead}")
    print(f"ok: {sentence}", flush=True)


def environment(folder):
    """Create a virtual environment and return its folder of commands."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin"


def build(scratch):
    """Build the sdist, and the wheel from it, into dist/; return the wheel."""
    commands = environment(scratch / "build")
    run(commands / "pip", "install", "--quiet", "build")
    printed = run(commands / "python", "-m", "build", "--outdir", ROOT / "dist", ROOT)
    return ROOT / "dist" / re.search(r"and (xkfac\S+\.whl)", printed)[1]


def check_contents(wheel):
    """Compare the files of the wheel with those of the source tree; return the version."""
    source = ROOT / "src"
    files = (path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {path.relative_to(source).as_posix() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata_file,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
    packed = {name for name in names if ".dist-info/" not in name}
    expect(
        packed == expected,
        f"the wheel holds the {len(expected)} files of src and no others",
        f"(missing: {sorted(expected - packed)}, too many: {sorted(packed - expected)})",
    )
    for data in ("py.typed", "report.html", "table.html", "recipes/*.toml"):
        expect(fnmatch.filter(packed, f"*/{data}"), f"{data} is among them")
    requirements = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    needs = {re.match(r"[\w-]+", line)[0] for line in requirements}
    expect(needs == LIBRARY_NEEDS, f"the library needs {', '.join(sorted(LIBRARY_NEEDS))} alone", f"(it needs {needs})")
    return metadata["Version"]


def check_library(wheel, commands, scratch, version):
    """Install the wheel without extras; import it, run README's example, and run the command."""
    run(commands / "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel)
    printed = run(commands / "python", "-I", "-W", "ignore", "-c", IMPORT, folder=scratch)
    expect(printed == version, f"import xkfac gives version {version} without {', '.join(ABSENT)}", printed)
    script = ROOT / "tests" / "helpers" / "readme_example.py"
    tasks = run(commands / "python", "-I", "-W", "ignore", script, ROOT / "README.md", folder=scratch)
    expect(tasks == "2", "README's example leaves a memory of 2 tasks", f"({tasks})")
    complaint = run(commands / "xkfac", "--version", folder=scratch, fails=True)
    sentence = complaint.splitlines()[-1]
    expect(REMEDY in sentence and "Traceback" not in complaint, f"the command without its extra says: {sentence}")


def check_command(wheel, commands, scratch, version):
    """Add the extra of the command, and run the command."""
    run(commands / "pip", "install", "--quiet", "--constraint", CONSTRAINTS, f"{wheel}[experiments]")
    run(commands / "pip", "check")
    printed = run(commands / "xkfac", "--version", folder=scratch)
    expect(printed == f"xkfac {version}", f"xkfac --version prints xkfac {version}", f"({printed})")
    recipe = run(commands / "xkfac", "recipe", "demo", folder=scratch)
    expect(recipe.startswith('name = "demo"'), "xkfac recipe demo prints the recipe", f"({recipe[:200]})")


def main():
    """Check the wheel that is given, or build one first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="check this wheel; without it, build one into dist/")
    given = parser.parse_args().wheel
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        wheel = (given or build(scratch)).resolve()
        print(f"{wheel.name}, Python {sys.version.split()[0]}", flush=True)
        version = check_contents(wheel)
        commands = environment(scratch / "clean")
        check_library(wheel, commands, scratch, version)
        check_command(wheel, commands, scratch, version)


if __name__ == "__main__":
    main()
