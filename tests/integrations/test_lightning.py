"""The Lightning callback does what the plain loop does, in every way that Lightning has to train."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import xkfac
from tests.integrations.small import bare_loop, batches, examples, network, same_memory, same_network

L = pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from xkfac.integrations.lightning import XKFACCallback  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "lightning.md"


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

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


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
    return net, xkfac.consolidate(Module(net), batches(0))


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
        pytest.param(
            Module,
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
            {},
            {"passes": 2, "clip": 0.1},
            id="accumulation and clipping",
        ),
        pytest.param(Manual, {}, {"accumulate_grad_batches": 2}, {"passes": 2}, id="manual optimization"),
        pytest.param(Module, {"precision": "bf16-mixed"}, {}, {"autocast": True}, id="bf16-mixed"),
    ],
)
def test_a_fit_equals_the_plain_loop(source, kind, options, callback_options, bare):
    net, memory = source
    found, callback = fitted(net, memory, kind, callback_options=callback_options, **options)
    expected, after = by_hand(net, memory, **bare)
    same_network(found, expected)
    same_memory(callback.memory, after)


def test_gradients_that_a_scaler_has_scaled(source):
    net, memory = source
    plugin = L.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.forward_context = torch.enable_grad  # float32, so that only the scale differs from the plain loop
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    found, _ = fitted(net, memory, plugins=plugin, **options)
    expected, _ = by_hand(net, memory, passes=2, clip=0.1)
    same_network(found, expected)


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
