"""The events of a job, one JSON object per line: each is checked, and all of them against what the job has to do."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from xkfac.experiments.files import parse_json
from xkfac.experiments.recipes.recipe import Plan
from xkfac.experiments.records import EVENTS
from xkfac.experiments.runs.results import JobResult
from xkfac.plain_values import from_plain

Event = dict[str, Any]


class EventsError(ValueError):
    """Events that are damaged, or not of the job; the message says which line, and why."""


def parse_events(content: bytes) -> list[Event]:
    """Return the events that a file holds; a last line that is not whole yet does not count.

    Raises EventsError for a line that is no event.
    """
    *lines, _ = content.split(b"\n")
    return [_event(number, line) for number, line in enumerate(lines, 1)]


def _event(number: int, line: bytes) -> Event:
    try:
        event = parse_json(line)
    except ValueError:
        raise EventsError(f"line {number} is no JSON") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise EventsError(f"line {number} is no event")
    kind = event["event"]
    if kind not in EVENTS:
        raise EventsError(f"line {number} is an event '{kind[:40]}', which is not known")
    try:
        return {"event": kind, **from_plain(EVENTS[kind], {key: event[key] for key in event if key != "event"}, "it")}
    except ValueError as error:
        raise EventsError(f"line {number} is an event '{kind}', and {error}") from None


def job_result(events: Sequence[Event], line: str, seed: int, plan: Plan) -> JobResult:
    """Return what a job has measured so far.

    plan: what it has to do. An end counts only where all that comes before it is there.

    Raises EventsError for events that no job of this line and seed, with this plan, can have left.
    """
    of = {kind: [event for event in events if event["event"] == kind] for kind in EVENTS}
    _check_start([event for event in events if event["event"] != "warning"], line, seed, plan)
    _check_epochs(of["epoch"], plan)
    _check_tasks(of["task"], plan)
    start = of["start"][0] if of["start"] else {}
    accuracy: list[list[float] | None] = []
    for event in of["task"]:
        accuracy += [None] * (event["task"] - len(accuracy))
        accuracy.append(event["accuracy"])
    end = next((event for event in reversed(of["end"]) if _counts(event, of["task"], plan)), None)
    return JobResult(
        line=line,
        seed=seed,
        accuracy=accuracy,
        before=[event["before"] for event in of["task"] if event.get("before") is not None],
        untrained=start.get("untrained", []),
        tasks=start.get("tasks", []),
        epochs=[{key: value for key, value in event.items() if key != "event"} for event in of["epoch"]],
        kept=[event["kept"] for event in of["task"]],
        seconds=[event["seconds"] for event in of["task"]],
        diverged=None if end is None else end.get("diverged"),
        done=end is not None,
        inference=next((event["inference"] for event in of["task"] if "inference" in event), []),
    )


def _check_start(events: Sequence[Event], line: str, seed: int, plan: Plan) -> None:
    starts = [event for event in events if event["event"] == "start"]
    if events and (len(starts) != 1 or events[0] is not starts[0]):
        raise EventsError("it must have one start, as its first event")
    for start in starts:
        if (start["line"], start["seed"]) != (line, seed):
            raise EventsError(f"it is of line '{start['line']}' with seed {start['seed']}")
        names = start.get("tasks")
        if names and (len(names) != plan.count or (plan.tasks and tuple(names) != plan.tasks)):
            wanted = ", ".join(plan.tasks) or f"{plan.count} tasks"
            raise EventsError(f"its tasks are {', '.join(names)}, and recipe.toml has {wanted}")


def _check_epochs(epochs: Sequence[Event], plan: Plan) -> None:
    places = [(event["task"], event["epoch"]) for event in epochs]
    for before, (task, epoch) in pairwise([(-1, -1), *places]):
        if (task, epoch) <= before:
            raise EventsError(f"epoch {epoch} of task {task} comes after epoch {before[1]} of task {before[0]}")
        if task + 1 not in plan.counts or epoch >= plan.epochs:
            raise EventsError(f"it has an epoch {epoch} of task {task}, which recipe.toml does not have")


def _check_tasks(tasks: Sequence[Event], plan: Plan) -> None:
    counts = [event["task"] + 1 for event in tasks]
    for event in tasks:
        if len(event["accuracy"]) != event["task"] + 1:
            raise EventsError(f"{len(event['accuracy'])} accuracies stand after task {event['task']}")
        inference = event.get("inference")
        if inference and {len(one) for one in (inference, *(of["taken"] for of in inference))} != {event["task"] + 1}:
            raise EventsError(f"the tasks that are inferred after task {event['task']} are others")
    if tuple(counts) != plan.counts[: len(counts)]:
        raise EventsError(f"it was measured after {_list(counts)} tasks, and recipe.toml has {_list(plan.counts)}")


def _counts(end: Event, tasks: Sequence[Event], plan: Plan) -> bool:
    """Whether all is there that an end needs: every stage, or those before the one that diverged."""
    diverged, left = end.get("diverged"), plan.counts[len(tasks) :]
    return not left if diverged is None else bool(left) and diverged == left[0] - 1


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
