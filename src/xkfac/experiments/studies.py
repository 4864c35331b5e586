"""The trials of tuning as Optuna's studies, one for each line, seed and task, that several machines can share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xkfac.experiments.folder import RunError, RunFolder
from xkfac.experiments.trials import GridPoint, Outcome

JOURNAL = "studies.journal"


def import_optuna() -> Any:
    """Return the module `optuna`, which says nothing but warnings.

    Raises RunError when it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise RunError(f"tuning needs Optuna ({error}): pip install 'xkfac[experiments]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(where: str) -> Any:
    """Return the storage at a URL of a database, such as sqlite:///tune.db, or of a journal file at a path.

    Raises RunError when it cannot be opened.
    """
    optuna = import_optuna()
    try:
        if "://" in where:
            return optuna.storages.RDBStorage(where)
        backend = optuna.storages.journal.JournalFileBackend(where, JournalLock(Path(where)))
        return optuna.storages.JournalStorage(backend)
    except Exception as error:  # each database has errors of its own
        raise RunError(
            f"the storage '{where}' cannot be opened ({error}); give the path of a journal file, or the URL of a "
            "database whose driver is installed"
        ) from None


@dataclass
class JournalLock:
    """The lock of a journal file. It ends with its process, and what a killed one wrote by halves is cut off."""

    path: Path

    def __post_init__(self) -> None:
        self._handle = -1

    def acquire(self) -> bool:
        """Wait until no other process writes."""
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        size = whole = os.fstat(self._handle).st_size
        while whole and os.pread(self._handle, 1, whole - 1) != b"\n":
            whole -= 1
        if whole < size:
            os.ftruncate(self._handle, whole)
        return True

    def release(self) -> None:
        """Let others write."""
        os.close(self._handle)


@dataclass
class Studies:
    """The studies of a run. Of a trial its number is the place of its point in the grid."""

    run: RunFolder
    storage: Any = field(init=False)

    def __post_init__(self) -> None:
        facts = self.run.facts["tuning"]
        self.storage = open_storage(facts["storage"] or str(self.run.path / JOURNAL))
        self._open: dict[str, Any] = {}

    def study(self, name: str, points: Sequence[GridPoint]) -> Study:
        """Return a study by name with all points of its grid queued; the caller holds the lock of the job."""
        if name not in self._open:
            self._open[name] = self._opened(name, points)
        return Study(self._open[name], points)

    def _opened(self, name: str, points: Sequence[GridPoint]) -> Any:
        optuna = import_optuna()
        study = optuna.create_study(
            storage=self.storage,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=0),  # is never asked: every point is given
        )
        mark = self.run.facts["tuning"]["id"]
        if study.user_attrs.get("run", mark) != mark:
            raise RunError(f"the storage has a study '{name}' of another run; choose another --storage for this one")
        study.set_user_attr("run", mark)
        for point in points:
            study.enqueue_trial(_parameters(point), skip_if_exists=True)
        return study


@dataclass(frozen=True)
class Study:
    """The trials of one task of a job."""

    study: Any
    points: Sequence[GridPoint]

    def begun(self) -> set[int]:
        """Return the numbers of the trials that were handed out."""
        waiting = import_optuna().trial.TrialState.WAITING
        return {trial.number for trial in self.study.get_trials(deepcopy=False) if trial.state != waiting}

    def ask(self) -> int:
        """Hand out the next trial and return its number."""
        choices = {name: [_parameters(point)[name] for point in self.points] for name in _parameters(self.points[0])}
        categorical = import_optuna().distributions.CategoricalDistribution
        number = self.study.ask({name: categorical(list(dict.fromkeys(v))) for name, v in choices.items()}).number
        return int(number)

    def tell(self, outcome: Outcome) -> None:
        """Note what a trial reached, unless that is known."""
        optuna = import_optuna()
        failed = optuna.trial.TrialState.FAIL if outcome.validation is None else None
        self.study.tell(outcome.number, outcome.validation, state=failed, skip_if_finished=True)


def _parameters(point: GridPoint) -> dict[str, float]:
    return {"lr": point.lr} if point.damping is None else {"lr": point.lr, "damping": point.damping}


def check_storage(where: str | None) -> str | None:
    """Return where a storage is, a path made absolute; None stands for the journal in the folder of the run."""
    if where is None or "://" in where:
        return where
    path = Path(where).expanduser().resolve()
    if path.is_dir():
        raise RunError(f"the storage '{where}' is a folder; give the path of a journal file, or the URL of a database")
    return str(path)
