"""Where numbers come from: command, commit, versions and hardware, kept beside every result."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import xkfac
from xkfac.errors import XkfacError

_PACKAGES = ("torch", "safetensors", "scikit-learn", "matplotlib", "numpy")


def provenance(device: torch.device, threads: int) -> dict[str, str]:
    """Return the command, commit, versions and hardware of this process.

    The commit is that of the source tree that the package runs from; a copy without history takes it from GIT_COMMIT.
    """
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "xkfac": xkfac.__version__,
        "python": platform.python_version(),
        **versions,
        "system": platform.platform(),
        "device": _device(device),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
    }


def device_of(name: str | torch.device, error: type[XkfacError]) -> torch.device:
    """Return a device by its name, `cpu`, `cuda` or `auto`; raises `error` for another, or a GPU that is not there."""
    kind = str(name).partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise error(f"device is '{name}'; it must be auto, cpu or cuda")
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise error("device is 'cuda', but torch sees no GPU; use --device cpu, or install a CUDA build of torch")
    return torch.device(("cuda" if available else "cpu") if kind == "auto" else name)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _commit() -> str:
    source = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    if git("ls-files", "--error-unmatch", Path(__file__).name) == "":
        return "unknown"
    changed = " with changes" if git("status", "--porcelain", str(source.parent)) else ""
    return git("rev-parse", "--short", "HEAD") + changed


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
