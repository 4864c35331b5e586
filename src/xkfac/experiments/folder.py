"""The folder of a run: what it holds, and how it stays whole whenever a process is killed.

    recipe.toml                       the recipe, every key written out
    run.json                          command, commit, versions, hardware, device, data folder
    jobs/LINE/SEED/events.jsonl       one JSON object a line: start, epoch, task, end
    jobs/LINE/SEED/checkpoint-*       the last two states of the job, tensors and numbers, no pickle
    jobs/LINE/SEED/memory-*           the memory that the latest states go on with
    results.json                      all of it, collected when the run ends

Whole files are written beside their place and renamed. A checkpoint says how long the events were when it was written;
what comes after it is cut off when a job goes on, and is written again, the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from xkfac import storage
from xkfac.errors import MemoryFileError, XkfacError
from xkfac.experiments.files import flush, replace_file
from xkfac.experiments.parsing import parse_recipe
from xkfac.experiments.recipe import SINGLE, Recipe
from xkfac.experiments.results import JobResult, LineResults, RunResults

CHECKPOINT = "xkfac-checkpoint"


class RunError(XkfacError):
    """A run that cannot be started, gone on with, or read."""


class NotWritten(RunError):
    """A file of a run that could not be written; the run can be gone on with."""


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job: a line with a seed."""

    path: Path
    line: str
    seed: int

    @property
    def _events(self) -> Path:
        return self.path / "events.jsonl"

    def note(self, event: str, **values: Any) -> None:
        """Append an event."""
        text = json.dumps({"event": event, **values}) + "\n"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._events.open("ab") as file:
                file.write(text.encode())
        except OSError as error:
            raise not_written(self._events, error) from None

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far; a last line that is not whole yet does not count."""
        try:
            *lines, _ = self._events.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"'{self._events}' cannot be read ({error})") from None
        try:
            events = [json.loads(line) for line in lines]
        except ValueError:
            events = [None]
        if not all(isinstance(event, dict) and "event" in event for event in events):
            raise RunError(
                f"'{self._events}' is damaged: a line of it is no event; remove the folder '{self.path}' to run this "
                "job again"
            )
        return events

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint in place of the one before the last; the last one stays as it is."""
        size = self._events.stat().st_size if self._events.exists() else 0
        numbers = [number for number, _ in self._checkpoints()]
        path = self.path / f"checkpoint-{max(numbers, default=0) + 1}.safetensors"
        try:
            if self._events.exists():
                flush(self._events)
            storage.write(path, {**state, "events": size}, tensors, CHECKPOINT)
        except (OSError, MemoryFileError) as error:
            raise not_written(path, error) from None
        for _, old in self._checkpoints()[:-2]:
            old.unlink(missing_ok=True)
        # Two checkpoints go on with two memories at most, and a memory is written only for a checkpoint.
        for _, old in _numbered(self.path, "memory")[:-2]:
            old.unlink(missing_ok=True)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        return _numbered(self.path, "checkpoint")

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the latest state that is whole, events cut back to it, or None where the job has to begin anew.

        A damaged checkpoint, or one whose memory is damaged, is moved aside and noted as a warning; the one before it
        leads to the same numbers.

        Raises RunError when there are checkpoints and none can be read.
        """
        damaged: list[tuple[Path, str]] = []
        for _, path in reversed(self._checkpoints()):
            try:
                state, tensors = storage.read(path, CHECKPOINT)
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                if state.get("memory") is not None:
                    storage.read(self.path / state["memory"])
            except MemoryFileError as error:
                damaged.append((path, str(error)))
                continue
            try:
                self._cut(state["events"])
                self._tidy(state.get("memory"))
                for bad, _ in damaged:
                    bad.replace(bad.with_suffix(".damaged"))
            except OSError as error:
                raise not_written(self.path, error) from None
            for _, reason in damaged:
                self.note("warning", text=f"{reason}; the job goes on from '{path.name}', written before it")
            return state, tensors
        if damaged:
            raise RunError(
                f"no checkpoint of job '{self.line}', seed {self.seed}, can be read: {damaged[0][1]}; remove the "
                f"folder '{self.path}' to run this job again from its start"
            )
        try:
            self._cut(0)
            self._tidy(None)
        except OSError as error:
            raise not_written(self.path, error) from None
        return None

    def _cut(self, size: int) -> None:
        length = self._events.stat().st_size if self._events.exists() else 0
        if length < size:
            raise RunError(
                f"'{self._events}' is shorter than its checkpoint says; remove the folder '{self.path}' to run this "
                "job again from its start"
            )
        if length > size:
            os.truncate(self._events, size)

    def _tidy(self, memory: str | None) -> None:
        """Remove what processes that were killed left behind: half files, and memories later than `memory`."""
        for part in self.path.glob(".xkfac-*.part"):
            part.unlink()
        memories = [path for _, path in _numbered(self.path, "memory")]
        for later in memories[[path.name for path in memories].index(memory) + 1 :] if memory else memories:
            later.unlink()

    def result(self) -> JobResult:
        """Return what the job has measured so far."""
        events = self.events()
        starts = [event for event in events if event["event"] == "start"]
        tasks = [event for event in events if event["event"] == "task"]
        ends = [event for event in events if event["event"] == "end"]
        accuracy: list[list[float] | None] = []
        for event in tasks:
            accuracy += [None] * (len(event["accuracy"]) - 1 - len(accuracy))
            accuracy.append(event["accuracy"])
        return JobResult(
            line=self.line,
            seed=self.seed,
            accuracy=accuracy,
            before=[event["before"] for event in tasks if event.get("before") is not None],
            untrained=starts[0]["untrained"] if starts else [],
            tasks=starts[0].get("tasks", []) if starts else [],
            epochs=[{k: v for k, v in event.items() if k != "event"} for event in events if event["event"] == "epoch"],
            kept=[event["kept"] for event in tasks],
            seconds=[event["seconds"] for event in tasks],
            diverged=ends[-1].get("diverged") if ends else None,
            done=bool(ends),
        )


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    path: Path
    recipe: Recipe
    facts: Mapping[str, Any]

    @classmethod
    def create(cls, path: Path, recipe: Recipe, facts: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run.

        Raises RunError when there is something at `path` already, or it cannot be written.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            remedy = f"go on with it by 'xkfac resume {path}'" if (path / "run.json").exists() else "empty it"
            raise RunError(f"'{path}' exists already; {remedy}, or choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / "recipe.toml", recipe.to_toml())
            write_text(path / "run.json", json.dumps(facts, indent=1) + "\n")
        except (OSError, NotWritten) as error:
            with contextlib.suppress(OSError):
                (path / "recipe.toml").unlink(missing_ok=True)
                path.rmdir()
            reason = _reason(error.__cause__ if isinstance(error, NotWritten) else error)
            raise RunError(f"the folder '{path}' cannot be made ({reason}); free space or choose another one") from None
        return cls(path, recipe, facts)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run.

        Raises RunError when it is none, or is damaged.
        """
        if not (path / "run.json").is_file() or not (path / "recipe.toml").is_file():
            raise RunError(f"'{path}' is not the folder of a run; 'xkfac status' lists runs")
        try:
            facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
            text = (path / "recipe.toml").read_text(encoding="utf-8")
            recipe = parse_recipe(text, str(path / "recipe.toml"))
        except (OSError, ValueError, XkfacError) as error:
            raise RunError(f"the run '{path}' is damaged: run.json or recipe.toml cannot be read ({error})") from None
        if not isinstance(facts, dict) or not {"place", "data"} <= set(facts):
            raise RunError(f"the run '{path}' is damaged: run.json does not say where it ran; start it anew")
        return cls(path, recipe, facts)

    def job(self, line: str, seed: int) -> JobFolder:
        """Return the folder of a job."""
        return JobFolder(self.path / "jobs" / line / str(seed), line, seed)

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
                found |= {result.tasks[task]: loss for task, loss in last.items() if loss is not None}
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
        jobs = [job.result().to_dict() for job in self.jobs()]
        write_text(self.path / "results.json", json.dumps({**self.facts, "jobs": jobs}) + "\n")

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[int]:
        """Hold the run for this process and those that inherit the file descriptor that is yielded.

        shared: others that hold it shared may hold it too, as those do that tune one run together.

        Raises RunError when another process holds it. A lock ends with the processes that hold it, however they end.
        """
        path = self.path / "lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise not_written(path, error) from None
        try:
            if not _flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                owner = os.pread(handle, 100, 0).decode(errors="replace").strip() or "another process"
                raise RunError(f"the run '{self.path}' is in use by {owner}; wait until it ends, or stop it first")
            # Who holds it is a courtesy: a full disk must not keep a run from ending.
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            yield handle
        finally:
            os.close(handle)

    def in_use(self) -> bool:
        """Whether a process holds the run; nothing is changed by asking."""
        try:
            handle = os.open(self.path / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            return not _flock(handle, fcntl.LOCK_EX)
        finally:
            os.close(handle)


def _flock(handle: int, kind: int) -> bool:
    """Lock a file; whoever only asks whether it is in use holds it for a moment, so that a few tries are made."""
    for _ in range(5):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs in a folder, and the folder itself if it is one, oldest first."""
    found = [path.parent for path in (*folder.glob("run.json"), *folder.glob("*/run.json"))]
    return sorted(found, key=lambda path: (path / "run.json").stat().st_mtime)


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing what is there only once all is on disk."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise not_written(path, error) from error


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    """Return the files NAME-NUMBER.safetensors of a folder with their numbers, the latest last."""
    found = [(path.stem.rpartition("-")[2], path) for path in folder.glob(f"{name}-*.safetensors")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def not_written(path: Path, error: Exception) -> NotWritten:
    """Return the error of a file that could not be written."""
    return NotWritten(
        f"'{path}' could not be written ({_reason(error)}); the last good state is kept: free space or fix the folder, "
        "then 'xkfac resume' goes on from it"
    )


def _reason(error: BaseException | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if error is None or error.__cause__ is None else _reason(error.__cause__)
