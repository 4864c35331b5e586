"""Whether a router's probabilities are right as often as they say, and what its threshold makes of other images."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

import xkfac

UNKNOWN = (0.01, 0.05)  # shares of their own images that tasks may fail to recognise
FROM = (0.0, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)  # where groups of probabilities begin


def percent(flags: Tensor) -> float:
    return 100 * flags.double().mean().item()


def groups(sure: Tensor, right: Tensor, weights: Tensor) -> list[dict[str, float]]:
    """Return the mean of probabilities [N] and the percentage that is right, group by group."""
    found = []
    for low, high in itertools.pairwise(FROM):
        chosen = (sure >= low) & (sure < high)
        total = weights[chosen].sum().clamp(min=1e-9)
        means = [100 * float((weights * one)[chosen].sum() / total) for one in (sure, right)]
        found.append({"from": low, "images": int(chosen.sum()), "sure": means[0], "right": means[1]})
    return found


def certainty(router: xkfac.Router, scores: list[Tensor]) -> dict[str, Any]:
    """Return how often probabilities are right, and how many images are unknown. scores: [N, T] of each task's images.

    Tasks count as the prior has it, whatever their number of images. `own`: images of a task that are unknown; `other`:
    the same where the router knows all tasks but this one.
    """
    weights = torch.cat(
        [share / len(one) * torch.ones(len(one)) for share, one in zip(router.classes.cpu(), scores, strict=True)]
    )
    place = torch.cat([torch.full((len(one),), task) for task, one in enumerate(scores)])
    surest = [torch.softmax(router.log_posterior(one), 1).max(1) for one in scores]
    sure = torch.cat([one.values for one in surest]).cpu()
    right = torch.cat([one.indices for one in surest]).cpu() == place
    found: dict[str, Any] = {"probabilities": groups(sure, right, weights)}
    for unknown in UNKNOWN:
        shares_of = {
            kind: [unknown_share(router, one, kind, task, unknown) for task, one in enumerate(scores)]
            for kind in ("own", "other")
        }
        found[f"unknown {unknown:g}"] = shares_of
    return found


def unknown_share(router: xkfac.Router, scores: Tensor, kind: str, task: int, unknown: float) -> float:
    """Return the percentage of images with these scores that are unknown, `other`: to a router without their task."""
    logits = router.log_posterior(scores)
    if kind == "other":
        logits[:, task] = -math.inf
    best = logits.argmax(1, keepdim=True)
    return percent(scores.gather(1, best)[:, 0] < router._level(unknown)[best[:, 0]])


def certainty_table(rows: dict[str, Any], names: list[str]) -> str:
    """Return tables of probabilities against shares that are right, and of unknown images."""
    lines = ["| | most likely task: probability from | images | mean probability | right |", "|---" * 5 + "|"]
    for name, row in rows.items():
        lines += [
            f"| {name} | {one['from']:g} | {one['images']} | {one['sure']:.1f} | {one['right']:.1f} |"
            for one in row["probabilities"]
            if one["images"]
        ]
    lines += ["", "| | " + " | ".join(f"{task}: unknown, where it is no task" for task in names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for name, row in rows.items():
        for unknown in UNKNOWN:
            of = row[f"unknown {unknown:g}"]
            cells = (f"{own:.1f}, {other:.1f}" for own, other in zip(of["own"], of["other"], strict=True))
            lines.append(f"| {name}, unknown={unknown:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
