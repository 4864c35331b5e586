"""Passes over data that leave no trace on a model."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xkfac.errors import XkfacError
from xkfac.model.batches import size_of, to_device
from xkfac.model.hooks import replace_forward, runs_its_class
from xkfac.model.renorm import _BatchRenorm

Statistics = Literal["batch", "population"]
Progress = bool | Callable[[Iterable[Any]], Iterable[Any]]
NO_BATCH = "the loader gave no batch; is it empty, or an iterator that was used up before?"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DistributedDataParallel, DataParallel or a compiled module."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner: Any = model.module
        else:
            inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def parallel_of(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel that wraps a model, inside a compiled module or outside of one, or None."""
    inner: Any = model
    while inner is not None and not isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = getattr(inner, "_orig_mod", None)
    return inner


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, or buffer, or the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def check_loaded(model: nn.Module) -> None:
    """Raise XkfacError for a part in TorchScript, which shows no passes, and for values on the meta device."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"'{path}'" if path else "the model"
            raise XkfacError(
                f"{what} is in TorchScript, whose passes cannot be followed; use the module it was made of"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise XkfacError(
                f"'{name}' is on the meta device and has no values; give the model memory by "
                "model.to_empty(device='cpu') and load its weights before a pass over data"
            )


def widest_dtype(model: nn.Module) -> torch.dtype:
    """Return the widest dtype of a model's floating-point parameters, float32 at least."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return reduce(torch.promote_types, dtypes, torch.float32)


def full_precision(device: torch.device) -> torch.autocast:
    """Return a context in which no matrix product is rounded to a reduced precision by autocast."""
    return torch.autocast(device.type, enabled=False)


def norms_of(model: nn.Module) -> dict[str, Any]:
    """Return the batch normalization and renormalization layers of a model by their path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, (_BatchNorm, _BatchRenorm))}


def set_mode(model: nn.Module, statistics: Statistics) -> None:
    """Put the model in evaluation mode, its BN layers in training mode when `statistics` is "batch".

    Running statistics stand still in either mode, so that no batch of a pass depends on the one before.
    """
    model.eval()
    norms: Iterable[Any] = norms_of(model).values()
    for norm in norms:
        # Not norm.train(): a BN with a dropout or an activation inside must not put these in training mode.
        norm.training = statistics == "batch"
        norm.track_running_stats = False


@contextmanager
def norms_per_process(model: nn.Module) -> Iterator[None]:
    """Have SyncBatchNorm layers normalise with the examples of their own process, as other BN layers do."""
    synchronised = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    with ExitStack() as replaced:
        for module in synchronised:
            if runs_its_class(module):
                replaced.callback(replace_forward(module, _BatchNorm.forward).remove)
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers, flags of modules and parameters, and global random state on leaving, bit by bit.

    Inside, compiled parts run as written, so that hooks see them, and autograd works even under inference mode.

    Raises XkfacError while another thread is inside with the same model, or with one that shares layers with it.
    """
    with _only_thread(model), torch.inference_mode(False):
        yield from _restored(model)


# The modules and parameters that passes are changing, by id, each with its thread; kept beside the modules, whose
# copies and pickles have nothing of it. Then what the last pass to end puts back.
_changing: dict[int, int] = {}
_put_back = ExitStack()
_changes = threading.Lock()  # guards all that passes of several threads share


@contextmanager
def _only_thread(model: nn.Module) -> Iterator[None]:
    """Refuse what another thread is changing; put back random state and how compiled code runs, which all share.

    The same thread may enter again. While several threads are inside, none can tell its own changes from those of
    others: the last to leave puts back what was there when the first entered.
    """
    own = threading.get_ident()
    with _changes:
        entered = {id(part) for part in (*model.modules(), *model.parameters())}
        if any(_changing.get(part, own) != own for part in entered):
            raise XkfacError(
                "another thread is running a pass over this model and has changed its flags until it is done; wait for "
                "it, or give each thread a deep copy of the model"
            )
        before = _random_state()
        if not _changing:
            _put_back.callback(_set_random_state, before)
            if "torch._dynamo" in sys.modules:  # else nothing can have been compiled
                _put_back.enter_context(torch.compiler.set_stance("force_eager"))
        entered -= _changing.keys()
        _changing.update(dict.fromkeys(entered, own))
    try:
        yield
    finally:
        with _changes:
            for part in entered:
                del _changing[part]
            if not _changing:
                _put_back.close()
            elif {*_changing.values()} == {own}:
                _set_random_state(before)


def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers and flags of a model."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = {
        buffer: buffer.detach().clone()
        for _, held in buffers
        for buffer in held.values()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    }
    flags = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in ("training", "track_running_stats")
        if hasattr(module, name)
    ]
    needs_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
        for module, name, flag in flags:
            setattr(module, name, flag)
        for parameter, flag in needs_grad:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


def _random_state() -> tuple[Any, ...]:
    """Return the state of all global generators of random numbers."""
    numpy = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    own = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    return random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state(), own


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the global random state on leaving."""
    with ExitStack() as after:
        after.callback(_set_random_state, _random_state())
        yield


def _set_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, devices = state
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
    torch.set_rng_state(cpu)
    for device, own in devices:
        torch.cuda.set_rng_state(own, device)


def check_loader(loader: Any) -> None:
    """Raise XkfacError for a loader that is no iterable of batches; a tensor would give its examples one by one."""
    if not isinstance(loader, Iterable) or isinstance(loader, Tensor):
        raise XkfacError(f"the loader is a {type(loader).__name__}; it must be an iterable of batches")


def batches(
    loader: Iterable[Any],
    device: torch.device,
    *,
    max_batches: int | None = None,
    progress: Progress = False,
    what: str = "batches",
    may_be_none: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Yield (number of examples, batch on `device`) for at most `max_batches` batches of a loader.

    `progress` is True for a line on standard error, or a function such as `tqdm.tqdm` that wraps an iterable.

    Raises XkfacError when the loader is no iterable, gives an empty batch, or nothing, unless there `may_be_none`.
    """
    if max_batches is not None and max_batches < 1:
        raise XkfacError(f"max_batches must be at least 1, not {max_batches}")
    check_loader(loader)
    total = count_batches(loader, max_batches)
    wrapped: Iterable[Any] = _bar(loader, total, what) if progress is True else loader
    if callable(progress):
        wrapped = progress(loader)
    seen = 0
    for batch in wrapped:
        size = size_of(batch)
        if size == 0:
            raise XkfacError(f"batch {seen} of the loader has no examples")
        yield size, to_device(batch, device)
        seen += 1
        if seen == max_batches:
            break
    if seen == 0 and not may_be_none:
        raise XkfacError(NO_BATCH)


def count_batches(loader: Iterable[Any], max_batches: int | None) -> int | None:
    """Return how many batches a pass over `loader` will have, or None if it does not say its length."""
    try:
        length = len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over a stream has a __len__ that raises
        length = None
    known = [count for count in (length, max_batches) if count is not None]
    return min(known) if known else None


def _bar(loader: Iterable[Any], total: int | None, what: str) -> Iterator[Any]:
    start = time.monotonic()
    count = 0
    try:
        for count, batch in enumerate(loader, 1):
            yield batch
            left = f", {(time.monotonic() - start) * (total - count) / count:.0f} s left" if total else ""
            print(f"\r{what}: {count}/{total or '?'}{left}    ", end="", file=sys.stderr, flush=True)
    finally:
        print(f"\r{what}: {count} in {time.monotonic() - start:.1f} s          ", file=sys.stderr, flush=True)
