"""Measure this library beside others that make Fisher matrices or K-FAC factors: time, memory, and who is right.

    python benchmarks/peers.py [--parts cost memory conduct growth] [--nets mlp ...] [--peers xkfac asdl ...]

Needs Python alone: the libraries go into an environment of their own, `.venv-peers`, with the versions of
`requirements-peers.txt` and `constraints.txt`. The benchmark itself is the folder `peers`; a whole run writes
`results/peers-cpu` and the tables of `docs/peers.md`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
OPTIONAL = ("kronfluence==1.0.1",)
WANTED = (HERE / "requirements-peers.txt", ROOT / "constraints.txt", ROOT / "pyproject.toml")


def prepare() -> None:
    """Make the environment, unless it is there as it should be."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in WANTED)).hexdigest()
    ready = FOLDER / "ready"
    if ready.exists() and ready.read_text() == digest:
        return
    ready.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    (FOLDER / ".gitignore").write_text("*\n")
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    # torch first, and pinned: what a peer asks for alone would bring another build.
    subprocess.run([*install, "torch", "torchvision"], check=True)
    subprocess.run([*install, "--requirement", str(WANTED[0]), "--editable", str(ROOT)], check=True)
    for package in OPTIONAL:  # what it needs besides may not be there; the benchmark then says so in its rows
        subprocess.run([*install, package], check=False)
    ready.write_text(digest)


def main() -> None:
    try:
        prepare()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"'{FOLDER.name}' could not be made: {error}; see what the command says above") from None
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(PYTHON, [str(PYTHON), str(HERE / "peers"), *sys.argv[1:]])


if __name__ == "__main__":
    main()
