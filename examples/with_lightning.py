"""Lightning: the module is as it was; a callback keeps what it knows while it learns a second task."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from digits import accuracy, images, loaders, network

import xkfac
from xkfac.integrations.lightning import XKFACCallback


class Module(L.LightningModule):
    """A plain LightningModule."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        """Return scores."""
        return self.network(x)

    def training_step(self, batch, index):
        """Return the loss."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.02, momentum=0.9)  # its steps are implicit in the penalty


def trainer(epochs, *callbacks):
    """Return a quiet trainer."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return L.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu", **quiet)


L.seed_everything(0, verbose=False)
source, held_out_source, source_test = loaders(*images(task=0))
target, _, target_test = loaders(*images(task=1))
module = Module()
trainer(8).fit(module, source)
before = accuracy(module, source_test)

memory = xkfac.consolidate(module, held_out_source)
memory = xkfac.calibrate(module, memory, held_out_source)
unprotected = copy.deepcopy(module)
trainer(5).fit(unprotected, target)

callback = XKFACCallback(memory)
trainer(5, callback).fit(module, target)
memory = callback.memory  # the memory of both tasks

forgetful, kept = accuracy(unprotected, source_test), accuracy(module, source_test)
print(f"source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
without, learnt = accuracy(unprotected, target_test), accuracy(module, target_test)
print(f"target after fine-tuning {without:.1f}%, with xkfac {learnt:.1f}%")
