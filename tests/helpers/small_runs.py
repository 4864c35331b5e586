"""Small runs of all kinds that take a moment each, disks that fill up, and processes that are killed."""

import contextlib
import errno
import functools
import io
import multiprocessing
import os
import signal
import time
from pathlib import Path
from unittest import mock

import torch

from xkfac import files
from xkfac.experiments.data.digits import load
from xkfac.experiments.recipes.parsing import parse_recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.job_folder import CHECKPOINT
from xkfac.experiments.runs.tasks import PermutedTasks

TEXT = """
name = "small"
title = "Small"
[data]
set = "digits"
validation = 48
train = 96
[defaults]
tasks = 3
epochs = 3
batch = 16
widths = [8, 6]
lr_every = 1
lr_factor = 2
curvature = { draws = 1 }
[lines.xkfac]
[lines.kfac]
method = "kfac"
keep = "all"
[lines.ewc]
method = "ewc"
[lines.fixed-bn]
method = "fixed-bn"
[lines.own-bn]
method = "own-bn"
own = ["6"]
[lines.own-layers]
own = ["0", "6"]
[lines.brn]
norm = "brn"
[lines.joint]
method = "joint"
at = [1, 3]
[lines.single]
method = "single"
[lines.balanced]
balance = true
balance_every = 2
[lines.average]
early_stopping = false
average = 2
[lines.validation]
consolidate = "validation"
early_stopping = false
[lines.plain]
method = "fine-tuning"
momentum = 0
[lines.corrected]
method = "corrected"
norm = "none"
"""
FACTS = {"place": "cpu", "data": None}


def recipe(*settings):
    """Return the recipe of small runs, changed by settings."""
    return parse_recipe(TEXT, "small", settings)


@functools.cache
def parts():
    """Return the data of small runs."""
    return load("digits", None, validation=48, train=96)


def job_run(folder, line, *, seed=0, data=None, seconds=0.0):
    """Return a job in a folder that writes a checkpoint whenever it can."""
    tasks = PermutedTasks(line, seed, data or parts())
    floors = dict.fromkeys(tasks.tasks, 0.1)
    return JobRun(line, seed, tasks, folder, checkpoint_seconds=seconds, floors=floors)


def make(path, made=None):
    """Return the folder of a new run that nothing has been done of yet."""
    return RunFolder.create(Path(path), made or recipe(), FACTS)


def finish(run, *names):
    """Learn jobs of a run, one after the other in this process, all that are not done by default."""
    for job in run.jobs():
        if (not names or job.line in names) and not job.result().done:
            job_run(job, run.recipe.lines[job.line], seed=job.seed).run()
    return run


def told(job):
    """Return what the events of a job say beside times and warnings."""
    events = [event for event in job.events() if event["event"] != "warning"]
    return [{key: value for key, value in event.items() if key not in ("time", "seconds")} for event in events]


def weights(job):
    """Return the tensors of a job's last checkpoint."""
    _, path = job._checkpoints()[-1]
    return files.read(path, CHECKPOINT)[1]


def assert_same(job, other):
    """Check that two jobs have the same numbers to the last bit."""
    assert told(job) == told(other)
    ours, theirs = weights(job), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)


def full(path):
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def read_only(path):
    """Fail as a file system does that is mounted to be read."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def die(path):
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Disk:
    """Counts what is done to the files below a folder, and lets an operation of a number meet its fault.

    Operations are: opening to write, the first writes, of which half gets through, flushing, renaming and removing.
    """

    def __init__(self, folder, at, fault=full):
        self.folder, self.at, self.fault, self.count = str(folder), at, fault, 0
        self.path = None

    def touch(self, path):
        """Count an operation on a path."""
        if self.concerns(path):
            self.count += 1
            if self.count == self.at:
                self.path = str(path)
                self.fault(path)

    def concerns(self, path):
        return isinstance(path, str | Path) and str(path).startswith(self.folder)

    @contextlib.contextmanager
    def faulty(self):
        real = {"open": io.open, "os_open": os.open, "fsync": os.fsync}
        disk = self

        class File:
            """A file that is open to be written."""

            def __init__(self, file, path):
                self._file, self._path, self._writes = file, path, 0

            def __enter__(self):
                return self

            def __exit__(self, *error):
                self._file.close()

            def write(self, data):
                data = data if isinstance(data, str) else bytes(data)
                self._file.write(data[: len(data) // 2])
                self._file.flush()
                self._writes += 1
                if self._writes < 3:
                    disk.touch(self._path)
                self._file.write(data[len(data) // 2 :])

        def opened(path, mode="r", *arguments, **options):
            writing = disk.concerns(path) and set(mode) & set("wax+")
            if writing:
                disk.touch(path)
            file = real["open"](path, mode, *arguments, **options)
            return File(file, path) if writing else file

        def os_opened(path, flags, *arguments, **options):
            if flags & os.O_CREAT:
                disk.touch(path)
            return real["os_open"](path, flags, *arguments, **options)

        def fsync(handle):
            path = Path(f"/proc/self/fd/{handle}").readlink()
            if not path.is_dir():  # a folder that cannot be flushed is none the worse
                disk.touch(path)
            real["fsync"](handle)

        def before(function, at=0):
            def done(*paths, **options):
                disk.touch(paths[at])
                return function(*paths, **options)

            return done

        with (
            mock.patch("io.open", opened),
            mock.patch("os.open", os_opened),
            mock.patch("os.fsync", fsync),
            mock.patch("os.replace", before(os.replace, 1)),
            mock.patch("os.unlink", before(os.unlink)) if self.fault is die else contextlib.nullcontext(),
        ):
            yield self


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["pytest", "tests.helpers.warm_up"])


def mortal(path, name, at):
    """Learn a job in this process, which dies at the operation on its files of that number."""
    torch.set_num_threads(1)
    job = RunFolder.open(Path(path)).job(name, 0)
    parts()
    with Disk(path, at, die).faulty():
        job_run(job, RunFolder.open(Path(path)).recipe.lines[name]).run()


def learn_and_die(run, name, at):
    """Learn a job in a process of its own as `mortal` does; return whether it was killed."""
    process = _SERVER.Process(target=mortal, args=(str(run.path), name, at))
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def learn_and_be_killed(run, name, moments):
    """Learn a job in a process of its own, killed at a random moment some events later; return whether it was."""
    job = run.job(name, 0)
    before = len(job.events()) + moments.randint(1, 4)
    process = _SERVER.Process(target=mortal, args=(str(run.path), name, -1))
    process.start()
    while process.is_alive() and len(job.events()) < before:
        time.sleep(0.002)
    process.join(moments.uniform(0, 0.05))
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0
