"""The folder of a run: what it holds, and how it stays whole whenever a process is killed.

    recipe.toml                       the recipe, every key written out
    run.json                          command, commit, versions, hardware, device, data folder, digest of recipe.toml
    jobs/LINE/SEED/events.jsonl       one JSON object per line: start, epoch, task, end
    jobs/LINE/SEED/checkpoint-*       the last two states of the job, tensors and numbers, no pickle
    jobs/LINE/SEED/memory-*           the memory that the latest states go on with
    results.json                      all of it, collected when the run ends

Whole files are written beside their place and renamed. A checkpoint says how long the events were when it was written,
and their digest; what comes after it is cut off when a job goes on, and is written again, the same. Nothing that a
folder holds is used before it is checked: a recipe that was changed since the run began, or events that no job of it
can have left, are one error that names the file.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.files import LARGEST_TEXT, check_path, locked, read_json, read_regular, reason
from xkfac.experiments.recipes.parsing import parse_recipe
from xkfac.experiments.recipes.recipe import SINGLE, Recipe
from xkfac.experiments.records import FACTS
from xkfac.experiments.runs.job_folder import JobFolder, NotWritten, RunError, digest_of, held, write_text
from xkfac.experiments.runs.results import LineResults, RunResults
from xkfac.plain_values import from_plain

_MOMENT = 0.1  # seconds; whoever only asks whether a run is in use holds its lock for less


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    path: Path
    recipe: Recipe
    facts: Mapping[str, Any]

    @classmethod
    def create(cls, path: Path, recipe: Recipe, facts: Mapping[str, Any]) -> Self:
        """Make the folder of a new run."""
        for name in recipe.lines:
            check_path(path / "jobs" / name / "checkpoint-000000.safetensors")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            remedy = f"go on with it by 'xkfac resume {path}'" if (path / "run.json").exists() else "empty it"
            raise RunError(f"'{path}' exists already; {remedy}, or choose another folder")
        text = recipe.to_toml()
        facts = {**facts, "recipe_sha256": digest_of(text.encode())}
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "recipe.toml", text)
            write_text(path / "run.json", json.dumps(facts, indent=1) + "\n")
        except (OSError, NotWritten) as error:
            with contextlib.suppress(OSError):
                (path / "recipe.toml").unlink(missing_ok=True)
                path.rmdir()
            said = f"the folder '{path}' cannot be made ({reason(error)}); free space or choose another one"
            raise RunError(said) from None
        return cls(path, recipe, facts)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the folder of a run."""
        check_path(path / "recipe.toml")
        if not (path / "run.json").is_file() or not (path / "recipe.toml").is_file():
            raise RunError(f"'{path}' is not the folder of a run; 'xkfac status' lists runs")
        try:
            facts = read_json(path / "run.json")
            content = read_regular(path / "recipe.toml", LARGEST_TEXT)
            _check_facts(path, facts, content)
            recipe = parse_recipe(content.decode(), str(path / "recipe.toml"), recorded=True)
        except RunError:
            raise
        except (OSError, ValueError, XkfacError) as error:
            raise RunError(
                f"the run '{path}' is damaged: run.json or recipe.toml cannot be read ({reason(error)}); restore them, "
                "or start a new run"
            ) from None
        return cls(path, recipe, facts)

    @property
    def place(self) -> torch.device:
        """The device that the run was started on."""
        return torch.device(self.facts["place"])

    def job(self, line: str, seed: int) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self.path / "jobs" / line / str(seed), line, seed, self.recipe.plan(line, seed))

    def jobs(self) -> list[JobFolder]:
        """Return the folders of all jobs, repeat by repeat, so that every line has a first result early."""
        return [self.job(line, seed) for seed in self.recipe.seeds for line in self.recipe.lines]

    def floors(self, seed: int) -> dict[str, float]:
        """Return C_t by task: the training loss at the end of a network of its own, of the repeat with this seed."""
        found: dict[str, float] = {}
        for name, line in self.recipe.lines.items():
            if line.method == SINGLE:
                result = self.job(name, seed).result()
                last = {epoch["task"]: epoch["loss"] for epoch in result.epochs}
                names = dict(enumerate(result.tasks))
                found |= {names[task]: loss for task, loss in last.items() if loss is not None and task in names}
        return found

    def results(self) -> RunResults:
        """Return what the run has measured so far."""
        lines = {
            name: LineResults(name, [self.job(name, seed).result() for seed in self.recipe.seeds])
            for name in self.recipe.lines
        }
        return RunResults(str(self.path), self.recipe, self.facts, lines)

    def collect(self) -> None:
        """Write results.json: the facts of the run and the result of every job."""
        jobs = [asdict(job.result()) for job in self.jobs()]
        write_text(self.path / "results.json", json.dumps({**self.facts, "jobs": jobs}) + "\n")

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[int]:
        """Hold the run for this process and those that inherit the file descriptor that is yielded.

        shared: others that hold it shared may hold it too, as those do that tune one run together.

        Raises RunError when another process holds it. A lock ends with the processes that hold it, however they end.
        """
        path = self.path / "lock"
        with held(path, shared=shared, wait=_MOMENT) as handle:
            if handle is None:
                owner = path.read_text(errors="replace")[:100].strip() or "another process"
                raise RunError(f"the run '{self.path}' is in use by {owner}; wait until it ends, or stop it first")
            # Who holds it is a courtesy: a full disk must not keep a run from ending.
            with contextlib.suppress(OSError):
                path.write_text(f"process {os.getpid()} on {os.uname().nodename}")
            yield handle

    def in_use(self) -> bool:
        """Whether a process holds the run; nothing is changed by asking."""
        path = self.path / "lock"
        with contextlib.suppress(OSError):
            if path.exists():
                with locked(path, wait=_MOMENT) as handle:
                    return handle is None
        return False


def _check_facts(path: Path, facts: Any, recipe: bytes) -> None:
    """Check run.json, and that recipe.toml is what it was when the run began; earlier versions noted no digest."""
    try:
        from_plain(FACTS, facts, "it")
    except ValueError as error:
        raise RunError(f"'{path / 'run.json'}' is damaged: {error}; restore it, or start a new run") from None
    if facts.get("recipe_sha256", digest := digest_of(recipe)) != digest:
        raise RunError(
            f"'{path / 'recipe.toml'}' was changed since the run began, and what was measured is not of it; restore it "
            "as it was, or start a new run with it"
        )


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, and the folder itself if it is one, oldest first."""
    check_path(folder / "run.json")
    found = [path.parent for path in (*folder.glob("run.json"), *folder.glob("*/run.json"))]

    def started(path: Path) -> float:
        with contextlib.suppress(OSError):
            return (path / "run.json").stat().st_mtime
        return 0.0

    return sorted(found, key=started)
