"""A folder that holds a network and its memory, with a model card: to share, and to load with one call."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from xkfac import files as storage
from xkfac.errors import MemoryFileError, MismatchError
from xkfac.learning.begin_checks import check_at_anchor
from xkfac.memory import Memory
from xkfac.model.merged_weight import bind
from xkfac.model.passes import unwrap

MEMORY, MODEL, CARD = "memory.safetensors", "model.safetensors", "README.md"


def save_pretrained(
    folder: str | Path, model: nn.Module, memory: Memory, storage_dtype: torch.dtype | None = None
) -> None:
    """Write a network, its memory and a model card to a folder, each file atomically.

    The network must be at the memory's anchor, as it is after `consolidate` or `finish`. storage_dtype: see
    `Memory.save`.

    Raises MismatchError for a network with other weights, MemoryFileError when a file cannot be written.
    """
    folder, model = Path(folder), unwrap(model)
    bound = bind(model, memory.units)
    check_at_anchor(bound, memory.to(next(model.parameters()).device).anchor, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        memory.save(folder / MEMORY, storage_dtype)
        storage.write_tensors(folder / MODEL, model.state_dict(), {"format": "pt"})
        (folder / CARD).write_text(card(memory, type(model).__name__), encoding="utf-8")
    except OSError as error:
        raise MemoryFileError(f"'{folder}' could not be written ({error}); choose another place") from error


def load_pretrained(folder: str | Path, model: nn.Module) -> Memory:
    """Load the network of a folder into `model`, in place, and return its memory, on the model's device.

    Raises MemoryFileError for files that are missing or damaged, MismatchError for another network's; the model is
    changed only if all can be loaded.
    """
    folder, model = Path(folder), unwrap(model)
    memory = Memory.load(folder / MEMORY, model, device=next(model.parameters()).device)
    try:
        with safe_open(folder / MODEL, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"'{folder / MODEL}' cannot be read ({error}); fetch or make it again") from None
    own = model.state_dict()
    other = [name for name in {**own, **state} if name not in own or name not in state]
    other += [name for name in state if name in own and state[name].shape != own[name].shape]
    if other:
        raise MismatchError(f"'{other[0]}' differs between '{folder / MODEL}' and the model; make the same network")
    model.load_state_dict(state)
    check_at_anchor(bind(model, memory.units), memory.anchor, None)
    return memory


def card(memory: Memory, network: str | None = None) -> str:
    """Return a model card of a memory in Markdown, with the header that the Hugging Face hub reads."""
    tasks = "1 task" if memory.tasks == 1 else f"{memory.tasks} tasks"
    facts = {
        "network": network or "not recorded",
        "tasks": str(memory.tasks),
        "examples": f"{memory.examples:,}",
        "method": f"`{memory.method.name}`",
        "likelihood": memory.likelihood.name,
        "calibration": str(memory.calibration or "none"),
        "left out": ", ".join(f"`{pattern}`" for pattern in memory.exclude) or "nothing",
        "curvature": f"{sum(tensor.numel() for _, tensor in memory.curvature.tensors()):,} numbers",
    }
    load = f'memory = xkfac.Memory.load("{MEMORY}", model)'
    if network is not None:
        load = 'memory = xkfac.load_pretrained("folder", model)  # weights and memory'
    rows = [f"| `{u.name}` | {u.kind} | {u.norm or '-'} | {' x '.join(map(str, u.shape))} |" for u in memory.units]
    return f"""---
library_name: xkfac
tags:
- continual-learning
- batch-normalization
- fisher-information
---
# Memory of {tasks}

What a network needs in order to learn further tasks without forgetting: its merged weights and their Fisher
information, and none of the data. Made with [xkfac](https://pypi.org/project/xkfac/).

| what | value |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in facts.items())}

## Use

```python
model = ...  # the same network
{load}
learner = xkfac.Learner(model, memory)
learner.begin(target_loader)
```

## Units

| unit | kind | BN | merged weight |
|---|---|---|---|
{chr(10).join(rows)}
"""
