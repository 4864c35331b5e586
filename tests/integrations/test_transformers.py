"""The trainer for Transformers does what the plain loop does: accumulation, evaluation, checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.integrations.small import run_page, same_memory, same_network

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
from xkfac.integrations.transformers import STATE_FILE, XKFACTrainer  # noqa: E402


def resnet():
    torch.manual_seed(1)
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def convnext():
    torch.manual_seed(1)
    config = transformers.ConvNextConfig(
        hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2, image_size=16, num_labels=3
    )
    return transformers.ConvNextForImageClassification(config)


def vit():
    torch.manual_seed(1)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16, patch_size=8
    )
    config.num_labels = 3
    return transformers.ViTForImageClassification(config)


def images(seed, number=22):
    """Return a data set as a Trainer takes it."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(number, 3, 16, 16, generator=generator) + seed
    labels = torch.randint(3, (number,), generator=generator)
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def batches(seed, size=4, number=22):
    return list(torch.utils.data.DataLoader(images(seed, number), size))


def arguments(folder, **options):
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    plain = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "use_cpu": True}
    amount = {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    return transformers.TrainingArguments(output_dir=str(folder), **{**quiet, **plain, **amount, **options})


@pytest.fixture
def _in_order(monkeypatch):
    """Let a Trainer take its examples as they come."""
    sampler = torch.utils.data.SequentialSampler
    monkeypatch.setattr(transformers.Trainer, "_get_train_sampler", lambda self, *_: sampler(self.train_dataset))


def bare_loop(model, memory, passes, by_items, implicit=True, make=torch.optim.SGD):
    """Learn the images 1 as a Trainer does, which weighs batches by images, or alike where a model takes no counts."""
    learner = xkfac.Learner(model, memory, penalty_every=1)
    loader = batches(1)
    optimizer = make(model.parameters(), 0.05)
    learner.begin(loader, optimizer if implicit and make is torch.optim.SGD else None)
    model.train()
    for _ in range(2):
        for start in range(0, len(loader), passes):
            step = loader[start : start + passes]
            total = sum(len(one["labels"]) for one in step)
            for one in step:
                loss = F.cross_entropy(model(one["pixel_values"]).logits, one["labels"])
                share = len(one["labels"]) / total if by_items else 1 / len(step)
                learner.objective(loss, share=share).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return learner.finish(loader)


@pytest.mark.usefixtures("_in_order")
@pytest.mark.parametrize(
    ("make", "passes", "optim", "implicit"),
    [
        (resnet, 1, "sgd", True),
        (resnet, 1, "sgd", False),
        (resnet, 1, "adagrad", True),
        (resnet, 2, "sgd", True),
        (convnext, 2, "sgd", True),
        (vit, 2, "sgd", True),
    ],
)
def test_training_equals_the_plain_loop(make, passes, optim, implicit, tmp_path):
    model = make()
    memory = xkfac.consolidate(model, batches(0), "xkfac", draws=2)
    expected, found = copy.deepcopy(model), copy.deepcopy(model)
    options = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": passes, "optim": optim}
    trainer = XKFACTrainer(
        found,
        arguments(tmp_path, **options),
        train_dataset=images(1),
        eval_dataset=images(2, 4),
        memory=memory,
        implicit=implicit,
    )
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optim]
    after = bare_loop(expected, memory, passes, trainer.model_accepts_loss_kwargs, implicit, kind)
    trainer.train()
    same_network(found, expected)
    same_memory(trainer.memory, after)


def killed(after):
    """Return a callback that ends training with an error after so many steps."""

    class Killed(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == after:
                raise RuntimeError("killed")

    return Killed()


def test_resuming_equals_an_unbroken_training(tmp_path):
    model = resnet()
    memory = xkfac.consolidate(model, batches(0), "xkfac", draws=2)

    def trainer(**options):
        shuffled = {"gradient_accumulation_steps": 2, "seed": 3}
        saved = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3, "optim_args": "momentum=0.9"}
        saved |= {"lr_scheduler_type": "linear", "warmup_steps": 3}
        return XKFACTrainer(
            copy.deepcopy(model),
            arguments(tmp_path, **shuffled, **saved),
            train_dataset=images(1),
            memory=memory,
            learner_options={"balance": xkfac.Balance(interval=2)},
            **options,
        )

    broken = trainer(callbacks=[killed(5)])
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in broken.model.modules())
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    expected = trainer()
    expected.train()
    same_network(resumed.model, expected.model, 0, 0)
    same_memory(resumed.memory, expected.memory, 0)
    assert torch.load(tmp_path / "checkpoint-4" / STATE_FILE)["implicit"]["lr"] == 0.05  # not that of the warm-up
    torch.testing.assert_close(resumed.learner.balance.state_dict(), expected.learner.balance.state_dict())
    (tmp_path / "checkpoint-2" / STATE_FILE).unlink()
    with pytest.raises(xkfac.XkfacError, match="resume from a checkpoint that this trainer has written"):
        trainer().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("make", [convnext, vit])
def test_without_bn_it_is_kfac(make):
    model = make()
    xkfac_memory, kfac_memory = (
        xkfac.consolidate(model, batches(0, number=8), method, labels="exact") for method in ("xkfac", "kfac")
    )
    for name, anchor in xkfac_memory.anchor.items():
        one = {other: torch.zeros_like(tensor) for other, tensor in xkfac_memory.anchor.items()}
        one[name] = torch.randn_like(anchor)
        found, expected = (memory.curvature.quadratic(one) for memory in (xkfac_memory, kfac_memory))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.usefixtures("_in_order")
@pytest.mark.filterwarnings("ignore")
def test_the_lines_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, args = resnet(), arguments(tmp_path)
    start = copy.deepcopy(model)
    source_trainer = transformers.Trainer(model, args, eval_dataset=images(0))
    names = {"model": model, "args": args, "source_trainer": source_trainer, "target": images(1)}
    run_page("transformers", names, monkeypatch)
    same_memory(xkfac.Memory.load("both.safetensors", model), bare_loop(start, names["memory"], 1, True))
    same_network(model, start)


def test_a_model_that_would_be_copied_is_refused(tmp_path):
    model, args = resnet(), arguments(tmp_path)
    memory = xkfac.consolidate(model, batches(0), "xkfac", draws=1)
    trainer = XKFACTrainer(model, args, train_dataset=images(1), memory=memory)
    args._n_gpu = 2
    with pytest.raises(xkfac.XkfacError, match="start one process per GPU with torchrun"):
        trainer.train()
