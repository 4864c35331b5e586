"""The Lightning callback does what the plain loop does, in every way that Lightning has to train."""

import copy
import importlib
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import xkfac
from tests.integrations.small import (
    adam,
    bare_loop,
    batches,
    examples,
    network,
    run_page,
    same_memory,
    same_network,
    sgd,
)

L = pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from xkfac.integrations.lightning import XKFACCallback  # noqa: E402


class Module(L.LightningModule):
    """A module as a user of Lightning writes it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    lr = 0.05

    def configure_optimizers(self):
        return sgd(self.parameters())


class WithAdam(Module):
    """The same with an optimizer whose steps cannot be implicit."""

    def configure_optimizers(self):
        return adam(self.parameters())


class Manual(Module):
    """The same with an optimizer that is stepped by hand, after every second batch."""

    automatic_optimization = False

    def training_step(self, batch, index):
        x, y = batch
        self.manual_backward(F.cross_entropy(self(x), y) / 2)
        if index % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.fixture
def source():
    """Return a network and the memory of its LightningModule."""
    net = network()
    return net, xkfac.consolidate(Module(net), batches(0), "xkfac")


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(**{"max_epochs": 2, "accelerator": "cpu", "enable_model_summary": False, **quiet, **options})


def loader(seed=1, **options):
    return DataLoader(TensorDataset(*examples(seed)), batch_size=8, **options)


def fitted(net, memory, kind=Module, target=None, callback_options=None, ckpt_path=None, **options):
    """Return a copy of a network after a fit with the callback, and the callback."""
    module = kind(copy.deepcopy(net))
    callback = XKFACCallback(memory, **(callback_options or {}))
    callbacks = [callback, *options.pop("callbacks", [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        fit = trainer(callbacks=callbacks, **options).fit
        fit(module, target or loader(), loader(2) if kind is Module else None, ckpt_path=ckpt_path)
    return module, callback


def by_hand(net, memory, **options):
    module = Module(copy.deepcopy(net))
    return module, bare_loop(module, memory, batches(1), **options)


@pytest.mark.parametrize(
    ("kind", "options", "callback_options", "bare"),
    [
        pytest.param(Module, {"val_check_interval": 2}, {}, {}, id="validation in mid-epoch"),
        pytest.param(Module, {}, {"implicit": False}, {"implicit": False}, id="plain steps"),
        pytest.param(WithAdam, {}, {}, {"make": adam}, id="Adam"),
        pytest.param(
            Module,
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
            {},
            {"passes": 2, "clip": 0.1},
            id="accumulation and clipping",
        ),
        pytest.param(Manual, {}, {"accumulate_grad_batches": 2}, {"passes": 2}, id="manual optimization"),
        pytest.param(Module, {"precision": "bf16-mixed"}, {}, {"autocast": torch.bfloat16}, id="bf16-mixed"),
    ],
)
def test_a_fit_equals_the_plain_loop(source, kind, options, callback_options, bare):
    net, memory = source
    found, callback = fitted(net, memory, kind, callback_options=callback_options, **options)
    expected, after = by_hand(net, memory, **bare)
    same_network(found, expected)
    same_memory(callback.memory, after)


def test_a_fit_in_double_precision_equals_the_plain_loop(source):
    net, memory = source
    found, callback = fitted(net, memory, precision="64-true")
    expected = Module(copy.deepcopy(net)).double()
    after = bare_loop(expected, memory, [(x.double(), y) for x, y in batches(1)])
    same_network(found, expected)
    same_memory(callback.memory, after)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_half_precision_with_a_gradient_scaler(source, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    net, memory = source

    def scaler():  # the gradients of its first step overflow, and the step is skipped
        return torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30)

    plugin = L.plugins.MixedPrecision("16-mixed", device, scaler())
    options = {"accelerator": device.replace("cuda", "gpu"), "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    found, _ = fitted(net, memory, plugins=plugin, devices=1, **options)
    expected = Module(copy.deepcopy(net)).to(device)
    target = [(x.to(device), y.to(device)) for x, y in batches(1)]
    bare_loop(expected, memory, target, passes=2, clip=0.1, autocast=torch.float16, scaler=scaler())
    assert plugin.scaler.get_scale() == 1024
    same_network(found.cpu(), expected.cpu())


class Killed(L.Callback):
    """Ends a fit with an error after so many batches."""

    def __init__(self, after):
        self.left = after

    def on_train_batch_end(self, *_):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("killed")


class Resumable(DataLoader):
    """A loader that goes on with the batch that comes next, as Lightning asks of loaders for resuming in an epoch."""

    position = 0

    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            if index >= self.position:
                self.position = (index + 1) % len(self)
                yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("saved", ["after an epoch", "in mid-epoch"])
def test_resuming_equals_an_unbroken_fit(source, tmp_path, saved):
    net, memory = source

    def run(**options):
        target = Resumable(TensorDataset(*examples(1)), batch_size=8)
        learner_options = {"balance": xkfac.Balance(interval=3)}
        return fitted(net, memory, target=target, callback_options=learner_options, max_epochs=3, **options)

    expected, unbroken = run()
    every = {"every_n_epochs": 1} if saved == "after an epoch" else {"every_n_train_steps": 2}
    kept = L.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **every)
    with pytest.raises(RuntimeError, match="killed"):
        run(callbacks=[kept, Killed(7)], enable_checkpointing=True)
    found, callback = run(ckpt_path=tmp_path / ("step=4.ckpt" if saved == "after an epoch" else "step=6.ckpt"))
    same_network(found, expected, 0, 0)
    same_memory(callback.memory, unbroken.memory, 0)
    torch.testing.assert_close(callback.learner.balance.state_dict(), unbroken.learner.balance.state_dict())


class OfThisProcess(Module):
    """A module whose processes have different batches, and leave what they have learnt in a folder."""

    folder = None

    def train_dataloader(self):
        return loader(1 + self.global_rank)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.1)

    def on_fit_end(self):
        (callback,) = (one for one in self.trainer.callbacks if isinstance(one, XKFACCallback))
        torch.save((self.state_dict(), callback.memory), self.folder / str(self.global_rank))


def two_processes(module, memory, epochs):
    """Learn as DDP does, in one process: gradients are averaged, buffers are those of process 0."""
    learner = xkfac.Learner(module, memory, penalty_every=1)
    loaders = [batches(1), batches(2)]
    optimizer = module.configure_optimizers()
    learner.begin([*loaders[0], *loaders[1]], optimizer)
    module.train()
    for pairs in list(zip(*loaders, strict=True)) * epochs:
        buffers = {}
        for x, y in pairs:
            before = copy.deepcopy(dict(module.named_buffers()))
            learner.objective(F.cross_entropy(module(x), y), share=0.5).backward()
            buffers = buffers or copy.deepcopy(dict(module.named_buffers()))
            module.load_state_dict(before, strict=False)
        module.load_state_dict(buffers, strict=False)
        optimizer.step()
        optimizer.zero_grad()
    learner.close()


@pytest.mark.parametrize("method", ["xkfac", "fixed-bn"])
def test_two_processes(method, tmp_path):
    net = network()
    memory = xkfac.consolidate(Module(net), batches(0), method)
    module = OfThisProcess(copy.deepcopy(net))
    module.folder = tmp_path
    options = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False, "limit_val_batches": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(callbacks=[XKFACCallback(memory, penalty_every=1)], **options).fit(module)
    (found, after), (other, other_after) = (torch.load(tmp_path / name, weights_only=False) for name in "01")
    expected = OfThisProcess(copy.deepcopy(net))
    two_processes(expected, memory, 2)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[name], other[name])
    assert after.tasks == 2
    same_memory(after, other_after, 0)


class Scaled(Module):
    """A module that changes its batches after they came to its device, as augmentation on a GPU does."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return 3 * x, y


def test_the_task_begins_with_the_batches_that_training_sees(source):
    net, memory = source
    seen = []

    class Start(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            seen.append(copy.deepcopy(module.state_dict()))

    fitted(net, memory, Scaled, callbacks=[Start()], max_epochs=1)
    expected = Module(copy.deepcopy(net))
    learner = xkfac.Learner(expected, memory)
    learner.begin([(3 * x, y) for x, y in batches(1)])
    torch.testing.assert_close(seen[0], dict(expected.state_dict()))


def test_a_loader_with_persistent_workers_keeps_its_batches(source):
    net, memory = source
    target = loader(num_workers=1, persistent_workers=True)
    found, _ = fitted(net, memory, target=target, max_epochs=2)
    expected, _ = by_hand(net, memory)
    same_network(found, expected)


def test_limits_and_several_loaders(source):
    net, memory = source
    callback = fitted(net, memory, limit_train_batches=2)[1]
    half = Module(copy.deepcopy(net))
    same_memory(callback.memory, bare_loop(half, memory, batches(1)[:2]))
    with pytest.raises(xkfac.XkfacError, match="several loaders; name the target's: XKFACCallback"):
        fitted(net, memory, target={"a": loader(), "b": loader()})
    together = {"a": loader(), "b": loader()}

    class Both(Module):
        def training_step(self, batch, index):
            return super().training_step(batch["a"], index)

    found, _ = fitted(net, memory, Both, target=together, callback_options={"loader": batches(1)})
    same_network(found, by_hand(net, memory)[0])


def test_an_interrupted_fit_leaves_no_hooks(source):
    net, memory = source
    module = Module(net)
    with pytest.raises(RuntimeError, match="killed"):
        trainer(callbacks=[XKFACCallback(memory), Killed(2)]).fit(module, loader(), loader())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())


def test_a_search_for_a_learning_rate_before_the_first_step(source, tmp_path):
    net, memory = source
    search = L.callbacks.LearningRateFinder(num_training_steps=4, update_attr=False)
    found, callback = fitted(net, memory, callbacks=[search], default_root_dir=tmp_path)
    expected, after = by_hand(net, memory)
    same_network(found, expected)
    same_memory(callback.memory, after)


def test_one_callback_learns_several_tasks(source):
    net, memory = source
    module, callback = Module(net), XKFACCallback(memory)
    for seed in (1, 2):
        trainer(callbacks=[callback]).fit(module, loader(seed), loader())
    assert callback.memory.tasks == 3


def test_the_older_package_name(source, monkeypatch):
    older = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")
    for name in ("lightning.pytorch", "xkfac.integrations.lightning"):
        monkeypatch.delitem(sys.modules, name)
    callback_class = importlib.import_module("xkfac.integrations.lightning").XKFACCallback
    assert issubclass(callback_class, older.Callback)

    class Older(older.LightningModule):
        forward, training_step = Module.forward, Module.training_step
        lr, configure_optimizers = Module.lr, Module.configure_optimizers

        def __init__(self, net):
            super().__init__()
            self.net = net

    net, memory = source
    module, callback = Older(copy.deepcopy(net)), callback_class(memory)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        older.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **options).fit(module, loader())
    expected, after = by_hand(net, memory)
    same_network(module, expected)
    same_memory(callback.memory, after)


@pytest.mark.filterwarnings("ignore")
def test_the_lines_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = Module(network())
    start = copy.deepcopy(module)
    names = {"L": L, "module": module, "held_out_source_loader": batches(0), "target_loader": loader()}
    run_page("lightning", names, monkeypatch)
    after = xkfac.Memory.load("both.safetensors", module)
    assert after.calibration is not None
    same_memory(after, bare_loop(start, names["memory"], batches(1)))
    same_network(module, start)


def test_calibration_after_a_fit(source):
    net, memory = source
    module, callback = fitted(net, memory)
    loader_of_both = [*batches(0), *batches(1)]
    scale = xkfac.calibrate(module, callback.memory, loader_of_both, tasks=1).calibration.scale
    same = xkfac.calibrate(Module(module.net), callback.memory, loader_of_both, tasks=1).calibration.scale
    assert scale == same
