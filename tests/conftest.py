"""Set-up of all tests: one thread a process, and torchvision's models without its compiled operators."""

import sys

import pytest
import torch
import torch.distributed as dist

from xkfac import cli

torch.set_num_threads(1)

if torch.version.cuda is None:
    # torchvision's compiled operators do not load beside a CPU build of torch; its models do not need them.
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def xkfac(monkeypatch, capfd):
    """Run the command in this process; return its exit code and what it wrote to both outputs."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["xkfac", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code or 0
        output = capfd.readouterr()
        return code, output.out, output.err

    return call
