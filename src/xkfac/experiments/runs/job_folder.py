"""The folder of a job: its events and checkpoints, whole at every moment and checked whenever they are read."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from xkfac import files as storage
from xkfac.errors import MemoryFileError, XkfacError
from xkfac.experiments.files import LARGEST_RECORD, locked, read_json, read_regular, reason, replace_file
from xkfac.experiments.recipes.recipe import Plan
from xkfac.experiments.records import MemoryName, Percent, Whole
from xkfac.experiments.runs.events import Event, EventsError, job_result, parse_events
from xkfac.experiments.runs.results import JobResult
from xkfac.plain_values import Amount, Record, from_plain, record_of

CHECKPOINT = "xkfac-checkpoint"


@dataclass
class JobState:
    """Where a job is: everything that a checkpoint holds beside tensors and memory.

    rate: what learning rates of protected parameters are multiplied by. singles: for networks of their own, the
    accuracy of each so far.
    """

    stage: int = 0
    epoch: int = 0
    best: float = -1.0
    kept: Whole = -1
    before: Percent | None = None
    seconds: Amount = 0.0
    diverged: bool = False
    rate: Amount = 1.0
    singles: list[Percent] = field(default_factory=list)


STATE = Record(
    {"events": int}, {"events_sha256": str, "memory": MemoryName | None, **record_of(JobState).free}, more=True
)
Found = TypeVar("Found")


class RunError(XkfacError):
    """A run that cannot be started, resumed, or read."""


class NotWritten(RunError):
    """A file of a run that could not be written; the run can be resumed."""

    exit_code = 1  # of the command


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job: a line with a seed. plan: what it has to do, where that is known."""

    path: Path
    line: str
    seed: int
    plan: Plan | None = None

    @property
    def _events(self) -> Path:
        return self.path / "events.jsonl"

    def note(self, event: str, **values: Any) -> None:
        """Append an event."""
        text = json.dumps({"event": event, **values}) + "\n"
        with writing(self._events):
            self.path.mkdir(parents=True, exist_ok=True)
            with self._events.open("ab") as file:
                file.write(text.encode())

    def events(self) -> list[Event]:
        """Return the events so far; a last line that is not whole yet does not count."""
        with self._checking():
            return parse_events(self._content())

    def _content(self) -> bytes:
        """Return the bytes of all events so far."""
        try:
            return read_regular(self._events, LARGEST_RECORD)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunError(f"'{self._events}' cannot be read ({reason(error)}); {self._remedy}") from None

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        try:
            yield
        except EventsError as error:
            restore = "restore recipe.toml, or " if "recipe.toml" in str(error) else ""
            raise RunError(f"'{self._events}' is damaged: {error}; {restore}{self._remedy}") from None

    @property
    def _remedy(self) -> str:
        return f"remove the folder '{self.path}' to run this job again from its start"

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint in place of the one before the last; the last one stays as it is."""
        events = self._content()
        known = {**state, "events": len(events), "events_sha256": digest_of(events)}
        number = max((number for number, _ in self._checkpoints()), default=0) + 1
        path = self.path / f"checkpoint-{number}.safetensors"
        with writing(path):
            if self._events.exists():
                storage.flush(self._events)
            storage.write(path, known, tensors, CHECKPOINT)
        # Two checkpoints go on with two memories at most, and a memory is written only for a checkpoint.
        for kind in ("checkpoint", "memory"):
            for _, old in _numbered(self.path, kind)[:-2]:
                old.unlink(missing_ok=True)

    def _checkpoints(self) -> list[tuple[int, Path]]:
        return _numbered(self.path, "checkpoint")

    def restore(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the latest state that is whole, events cut back to it, or None where the job has to begin anew.

        A damaged checkpoint, or one whose memory is damaged, is moved aside and noted as a warning; the one before it
        leads to the same numbers.
        """
        damaged: list[tuple[Path, str]] = []
        for _, path in reversed(self._checkpoints()):
            try:
                state, tensors = storage.read(path, CHECKPOINT)
                from_plain(STATE, state, f"the damaged '{path}'")
                if state.get("memory") is not None:
                    storage.read(self.path / state["memory"])
            except ValueError as error:  # a MemoryFileError is one
                damaged.append((path, str(error)))
                continue
            with writing(self.path):
                self._cut(state["events"], state.get("events_sha256"))
                self._tidy(state.get("memory"))
                for bad, _ in damaged:
                    bad.replace(bad.with_suffix(".damaged"))
            for _, fault_of in damaged:
                self.note("warning", text=f"{fault_of}; the job goes on from '{path.name}', written before it")
            return state, tensors
        if damaged:
            raise RunError(
                f"no checkpoint of job '{self.line}', seed {self.seed}, can be read: {damaged[0][1]}; {self._remedy}"
            )
        with writing(self.path):
            self._cut(0)
            self._tidy(None)
        return None

    def _cut(self, size: int, digest: str | None = None) -> None:
        """Leave the first `size` bytes of the events, which must have a digest if it is given."""
        events = self._content()
        if len(events) < size:
            raise RunError(f"'{self._events}' is shorter than its checkpoint says; {self._remedy}")
        if digest is not None and digest_of(events[:size]) != digest:
            raise RunError(f"'{self._events}' was changed since its checkpoint was written; {self._remedy}")
        if len(events) > size:
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
        assert self.plan is not None  # a trial has events, and no result of its own
        with self._checking():
            return job_result(events, self.line, self.seed, self.plan)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text file, replacing what is there only once all is on disk."""
    with writing(path):
        replace_file(path, text.encode())


def write_record(path: Path, record: Any) -> None:
    """Write an instance of a dataclass as JSON."""
    write_text(path, json.dumps(asdict(record)) + "\n")


def read_record(path: Path, kind: type[Found]) -> Found | None:
    """Return what a file holds as an instance of a dataclass, None if there is no file."""
    try:
        plain = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"'{path}' cannot be read ({reason(error)}); remove it to have it made again") from None
    try:
        record: Found = from_plain(kind, plain, "it")
    except ValueError as error:
        raise RunError(f"'{path}' is damaged: {error}; remove it to have it made again") from None
    return record


def _numbered(folder: Path, name: str) -> list[tuple[int, Path]]:
    """Return the files NAME-NUMBER.safetensors of a folder with their numbers, the latest last."""
    found = [(path.stem.rpartition("-")[2], path) for path in folder.glob(f"{name}-*.safetensors")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


@contextlib.contextmanager
def held(path: Path, *, shared: bool = False, wait: float = 0.0) -> Iterator[int | None]:
    """Lock a file as `locked` does; raises NotWritten where it cannot be made."""
    with contextlib.ExitStack() as holding:
        with writing(path):
            handle = holding.enter_context(locked(path, shared=shared, wait=wait))
        yield handle


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into the error that names the file, NotWritten."""
    try:
        yield
    except (OSError, MemoryFileError) as error:
        raise NotWritten(
            f"'{path}' could not be written ({reason(error)}); the last good state is kept: free space or fix the "
            "folder, then 'xkfac resume' goes on from it"
        ) from error
