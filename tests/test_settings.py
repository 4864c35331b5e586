"""Settings of torch that all code of a process shares: calls of the library leave them, and go by any of them."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import xkfac
from tests.helpers.setups import Everything, data, randomise, target
from xkfac.curvature.input_moments import Deviations
from xkfac.curvature.moments import GROUPINGS
from xkfac.curvature.patches import Patches
from xkfac.model.tracing import Convolution
from xkfac.model.units import Unit

PATHS = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
NEW_SETTINGS = hasattr(torch.backends, "fp32_precision")


def images(make=data):
    return make(shape=(2, 16, 16))


def backend(path):
    module = torch.backends
    for name in filter(None, path.split(".")):
        module = getattr(module, name, None)
    return module


@pytest.fixture(autouse=True)
def _inherited():
    """Let backends inherit their precision, as in a new process; `torch.set_float32_matmul_precision` ends that."""
    reset()
    yield
    reset()


def reset():
    for path in ("", "cuda.matmul", "mkldnn.matmul") if NEW_SETTINGS else ():
        backend(path).fp32_precision = "none"


def settings():
    """Return torch's global settings, those of torch before 2.9 and those since, as far as this torch has them."""
    found = {path: getattr(backend(path), "fp32_precision", None) for path in PATHS}
    found |= {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found["precision"] = torch.get_float32_matmul_precision()
        except RuntimeError:
            found["precision"] = "set by backend"
    found["deterministic algorithms"] = torch.are_deterministic_algorithms_enabled()
    found["threads"] = torch.get_num_threads()
    found["dtype"] = torch.get_default_dtype()
    found["gradients"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    found["autocast"] = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return found


def whole_task():
    """Consolidate, calibrate, learn a target and finish, with convolutions, linear layers and lone BN."""
    model = randomise(Everything())
    memory = xkfac.consolidate(model, images(), "xkfac")
    memory = xkfac.calibrate(model, memory, images(), tasks=1)
    learner = xkfac.Learner(model, memory)
    learner.begin(images(target))
    for x, y in images(target):
        learner.objective(F.cross_entropy(model(x), y)).backward()
    learner.finish(images(target))


def test_no_setting_of_torch_is_different_afterwards():
    before = settings()
    whole_task()
    assert settings() == before


@pytest.mark.skipif(not NEW_SETTINGS, reason="torch before 2.9 has one setting of precision, which nothing inherits")
def test_a_setting_of_all_backends_still_reaches_each_of_them_afterwards():
    whole_task()
    torch.backends.fp32_precision = "tf32"
    assert {backend(path).fp32_precision for path in ("cuda.matmul", "mkldnn.matmul", "mkldnn.conv")} == {"tf32"}


@pytest.mark.skipif(not NEW_SETTINGS, reason="torch before 2.9 has one setting of precision")
@pytest.mark.parametrize("path", ["", "mkldnn.matmul"])
def test_precision_may_be_set_by_backend(path):
    # torch.get_float32_matmul_precision raises then.
    backend(path).fp32_precision = "tf32"
    before = settings()
    whole_task()
    assert settings() == before


class Coarse(TorchDispatchMode):
    """Rounds the factors of products of float32 matrices to bfloat16, as a device may."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = {"bmm": 0, "mm": 0, "baddbmm": 1, "baddbmm_": 1}.get(func.overloadpacket.__name__)
        if first is not None and args[first].dtype == torch.float32:
            args = [*args[:first], *(one.bfloat16().float() for one in args[first:])]
        return func(*args, **(kwargs or {}))


def test_the_move_of_the_origin_is_not_rounded_at_a_coarse_precision():
    # Patches of 0 and 1 are exact in bfloat16, their mean 1/3 is not.
    unit = Unit("conv", "conv", (1, 1, 4), convolution=Convolution((1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1)))
    deviations = Deviations(Patches(unit), GROUPINGS["paper"])
    with Coarse():
        deviations.add(torch.zeros(1, 4, 5, 5))
        deviations.add(torch.stack([torch.ones(4, 5, 5), torch.zeros(4, 5, 5)]))
        deviations.settle(3)
        found = deviations.sum()
    torch.testing.assert_close(found, torch.full((1, 4, 4), 9 * 2 / 3), rtol=1e-6, atol=0)
