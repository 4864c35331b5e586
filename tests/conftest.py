"""Set-up of all tests: one thread a process, and torchvision's models without its compiled operators."""

import pytest
import torch

torch.set_num_threads(1)

if torch.version.cuda is None:
    # torchvision's compiled operators do not load beside a CPU build of torch; its models do not need them.
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
