"""Transformers: a ResNet for images, made small, learns a second task with XKFACTrainer in place of Trainer."""

import copy

import torch
from digits import images
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import xkfac
from xkfac.integrations.transformers import XKFACTrainer


def dataset(task):
    """Return the images as a Trainer takes them: for training, held out, and for the test."""
    x, y = images(task)
    items = [{"pixel_values": one.view(1, 8, 8), "labels": label} for one, label in zip(x, y, strict=True)]
    return items[:1000], items[1000:1400], items[1400:]


def arguments(epochs):
    """Return quiet arguments."""
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    sgd = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.05}  # its steps are implicit in the penalty
    return TrainingArguments(
        "output", num_train_epochs=epochs, per_device_train_batch_size=64, use_cpu=True, **sgd, **quiet
    )


def accuracy(model, items):
    """Return the percentage of right answers."""
    answers = Trainer(model, arguments(1)).predict(items)
    return 100 * (answers.predictions.argmax(1) == answers.label_ids).mean()


torch.manual_seed(0)
source, held_out_source, source_test = dataset(task=0)
target, _, target_test = dataset(task=1)
config = ResNetConfig(
    num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config)
source_trainer = Trainer(model, arguments(6), train_dataset=source, eval_dataset=held_out_source)
source_trainer.train()
before = accuracy(model, source_test)

memory = xkfac.consolidate(model, source_trainer.get_eval_dataloader())
memory = xkfac.calibrate(model, memory, source_trainer.get_eval_dataloader())
unprotected = copy.deepcopy(model)
Trainer(unprotected, arguments(3), train_dataset=target).train()

trainer = XKFACTrainer(model, arguments(3), train_dataset=target, memory=memory)
trainer.train()
memory = trainer.memory  # the memory of both tasks

forgetful, kept = accuracy(unprotected, source_test), accuracy(model, source_test)
print(f"source before {before:.1f}%, after fine-tuning {forgetful:.1f}%, with xkfac {kept:.1f}%")
without, learnt = accuracy(unprotected, target_test), accuracy(model, target_test)
print(f"target after fine-tuning {without:.1f}%, with xkfac {learnt:.1f}%")
