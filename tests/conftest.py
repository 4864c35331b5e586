"""Set-up of all tests: one thread a process, and torchvision's models without its compiled operators."""

import pytest
import torch

torch.set_num_threads(1)

# torchvision's compiled operators do not load beside a CPU build of torch; its models do not need them.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    try:
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        pass


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
