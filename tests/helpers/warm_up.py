"""Imported by the server that the processes of tests are forked from: a job brings in all that torch imports late."""

import tempfile

import torch

from tests.helpers import small_runs

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as _folder:
    small_runs.finish(small_runs.make(f"{_folder}/run"), "xkfac")
