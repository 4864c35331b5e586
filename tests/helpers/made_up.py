"""Results of runs that never ran, with numbers that can be worked out by hand."""

import json
import math
from dataclasses import replace

from xkfac.experiments.recipes.parsing import parse_recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.results import JobResult, LineResults, RunResults

PROVENANCE = {
    "command": "xkfac run paper --folder runs/paper",
    "commit": "0123abc",
    "xkfac": "0.1.0",
    "torch": "2.13.0",
    "device": "a made-up accelerator <80 GB>",
    "versions": {"numpy": "2.4.6", "python": "3.11.9"},
    "threads": 1,
}


def accuracy_after(task, learnt, loss=1.0, start=96.0, seed=0):
    """The accuracy on a task, counted from 0, after `learnt` more were learnt: it falls by `loss` with each."""
    return start + seed - loss * learnt


def job(line, seed=0, tasks=10, *, loss=1.0, start=96.0, epochs=3, penalised=True, done=True, diverged=None):
    """A job whose average accuracy after t tasks is start + seed - loss * (t - 1) / 2."""
    reached = tasks if diverged is None else diverged
    rows = [[accuracy_after(i, t - i, loss, start, seed) for i in range(t + 1)] for t in range(reached)]
    return JobResult(
        line=line,
        seed=seed,
        accuracy=rows,
        before=[12.0 + seed] * reached,
        untrained=[10.0] * tasks,
        epochs=[
            {
                "task": task,
                "epoch": epoch,
                "lr": 0.1,
                "loss": 0.5 / (1 + epoch) + 0.02 * seed,
                "penalty": 0.01 * task * (1 + epoch) if penalised else 0.0,
                "validation": 95.0,
            }
            for task in range(reached)
            for epoch in range(epochs)
        ],
        kept=[epochs - 1] * reached,
        seconds=[2.0 + seed] * reached,
        diverged=diverged,
        done=done,
    )


def joint(line, seed, at):
    """A job of joint training: 98 + seed percent wherever it was measured."""
    rows = [[98.0 + seed] * count if count in at else None for count in range(1, max(at) + 1)]
    return JobResult(
        line=line, seed=seed, accuracy=rows, untrained=[10.0] * max(at), seconds=[9.0] * len(at), done=True
    )


def run(recipe_text, jobs, folder="runs/made-up", provenance=PROVENANCE):
    """A run of a recipe from its jobs in any order; those that are not given have not begun."""
    recipe = parse_recipe(recipe_text, "made-up")
    given = {(job.line, job.seed) for job in jobs}
    waiting = [JobResult(n, seed) for n in recipe.lines for seed in recipe.seeds if (n, seed) not in given]
    lines = {name: LineResults(name, [j for j in (*jobs, *waiting) if j.line == name]) for name in recipe.lines}
    return RunResults(folder, recipe, provenance, lines)


SMALL = """
title = "Made-up digits"
description = "Two lines and a reference."
repeats = 2
[data]
set = "digits"
validation = 100
[defaults]
tasks = 10
epochs = 3
[lines.xkfac]
label = "XK-FAC"
note = "the extended curvature"
[lines.kfac]
label = "K-FAC"
method = "kfac"
damping = 0.01
[lines.joint]
label = "joint training"
method = "joint"
at = [5, 10]
[figures.a]
title = "Kinds of curvature"
note = "Bands are one standard deviation."
lines = ["xkfac", "kfac", "joint"]
"""


def small(folder="runs/made-up", shift=0.0):
    """Two repeats of XK-FAC (loses 1 point a task) and K-FAC (loses 2), and joint training."""
    jobs = [job("xkfac", seed, start=96 + shift) for seed in (0, 1)]
    jobs += [job("kfac", seed, loss=2.0) for seed in (0, 1)]
    return run(SMALL, [*jobs, *(joint("joint", seed, (5, 10)) for seed in (0, 1))], folder)


def single():
    """One repeat, so that there is no deviation."""
    text = SMALL.replace("repeats = 2", "repeats = 1")
    return run(text, [job("xkfac"), job("kfac", loss=2.0), joint("joint", 0, (10,))], "runs/single")


def diverged():
    """One repeat of two diverges: K-FAC's at its seventh task, XK-FAC's at its fourth."""
    jobs = [
        job("xkfac", 0),
        job("xkfac", 1, diverged=3),
        job("kfac", 0, loss=2.0),
        job("kfac", 1, loss=2.0, diverged=6),
    ]
    return run(SMALL, jobs, "runs/diverged")


def in_progress():
    """Four tasks of ten by one repeat of XK-FAC; the second has just begun; nothing of the others."""
    jobs = [job("xkfac", 0, 4, done=False), JobResult("xkfac", 1, untrained=[10.0] * 10), JobResult("kfac", 0)]
    return run(SMALL, jobs, "runs/in-progress")


def nothing():
    """A run that has not measured anything yet."""
    return run(SMALL, [], "runs/nothing")


IMAGES = """
name = "made-up-images"
title = "Made-up images"
repeats = 2
[images]
model = "resnet18"
weights = "source.safetensors"
pixels = 64
orders = [["birds", "cars", "flowers"], ["flowers", "cars", "birds"]]
[tasks.tiny]
tree = "tiny.zip"
[tasks.birds]
tree = "birds.zip"
[tasks.cars]
tree = "cars.zip"
[tasks.flowers]
tree = "flowers.zip"
[defaults]
epochs = 3
[lines.single]
label = "a network of its own"
method = "single"
[lines.fine-tuning]
label = "fine-tuning"
method = "fine-tuning"
[lines.fixed-bn]
label = "fixed BN"
method = "fixed-bn"
[lines.kfac]
label = "K-FAC"
method = "kfac"
[lines.xkfac]
label = "XK-FAC"
[lines.xkfac-alpha]
label = "XK-FAC, alpha"
balance = true
[figures.accuracy]
title = "Average accuracy"
lines = ["xkfac-alpha", "xkfac", "kfac", "fixed-bn", "fine-tuning", "single"]
"""
CEILINGS = {"tiny": 60.0, "birds": 50.0, "cars": 80.0, "flowers": 40.0}
ORDERS = (("tiny", "birds", "cars", "flowers"), ("tiny", "flowers", "cars", "birds"))


def image_job(line, seed=0, *, loss=1.0, order=None, below=0.0, tasks=4, done=True):
    """A job of images: a task is at its ceiling less `below` when learnt, and loses `loss` points with each later."""
    order = ORDERS[seed % 2] if order is None else order
    top = {task: value + seed - (0 if task == "tiny" else below) for task, value in CEILINGS.items()}

    def row(after):
        return [top[name] - loss * (after - place) for place, name in enumerate(order[: after + 1])]

    like = job(line, seed, tasks, penalised=loss > 0)
    epochs = [epoch for epoch in like.epochs if epoch["task"]]
    known = {"untrained": [60.0 + seed, 0.5, 0.5, 1.0], "before": [0.5] * (tasks - 1), "kept": [-1, *[2] * (tasks - 1)]}
    return replace(like, accuracy=list(map(row, range(tasks))), tasks=order, epochs=epochs, done=done, **known)


def images(*jobs, text=IMAGES, folder="runs/images", provenance=PROVENANCE):
    """Two repeats in two orders: ceilings, and lines that lose 15, 10, 5, 2 and 1 points a task; or the given jobs."""
    losses = {"fine-tuning": 15.0, "fixed-bn": 10.0, "kfac": 5.0, "xkfac": 2.0, "xkfac-alpha": 1.0}
    made = [image_job(line, seed, loss=loss, below=4.0) for line, loss in losses.items() for seed in (0, 1)]
    return run(text, jobs or [image_job("single", seed, loss=0.0) for seed in (0, 1)] + made, folder, provenance)


SWEEPS = """
name = "made-up-sweeps"
title = "Made-up sweeps"
repeats = 2
[images]
model = "resnet18"
weights = "source.safetensors"
pixels = 64
[tasks.tiny]
tree = "tiny.zip"
[tasks.cars]
tree = "cars.zip"
[defaults]
epochs = 3
sweep = [0.1, 1, 10]
[lines.single]
label = "a network of its own"
method = "single"
sweep = { lr = [0.1, 0.01] }
[lines.fine-tuning]
label = "fine-tuning"
method = "fine-tuning"
sweep = { lr = [0.1, 0.01] }
[lines.kfac]
label = "K-FAC"
method = "kfac"
[lines.xkfac]
label = "XK-FAC"
[lines.calibrated]
label = "calibrated"
sweep = []
"""
# By line: accuracy on the source, of 50, and on the target, of 80 at best, with seed 0.
SWEPT = {
    "single-lr0.1": (50, 80), "single-lr0.01": (50, 60), "fine-tuning-lr0.1": (20, 76), "fine-tuning-lr0.01": (40, 60),
    "kfac-x0.1": (30, 72), "kfac-x1": (40, 64), "kfac-x10": (48, 40),
    "xkfac-x0.1": (35, 76), "xkfac-x1": (45, 72), "xkfac-x10": (49.5, 56), "calibrated": (47, 66),
}  # fmt: skip


def sweep_job(line, seed=0, **changes):
    """A job of a sweep: with seed 1 one point less is kept, and the target and its ceiling are 4 points higher."""
    source, target = SWEPT[line]
    made = job(line, seed, 2)
    target += 4 * seed
    # The better ceiling on test images is the better one on validation images too.
    epochs = [{**epoch, "validation": target - 5} for epoch in made.epochs if epoch["task"]]
    rows = [[50.0], [source - seed, target]]
    facts = {"tasks": ("tiny", "cars"), "before": [0.5], "untrained": [], "kept": [-1, 2], "epochs": epochs}
    return replace(made, **{"accuracy": rows, **facts, **changes})


def sweeps(*jobs, text=SWEEPS, folder="runs/sweeps"):
    """Two repeats of three methods at several strengths or rates, one line by itself, two ceilings; or given jobs."""
    return run(text, jobs or [sweep_job(line, seed) for line in SWEPT for seed in (0, 1)], folder)


def tuned(folder, *jobs, text=IMAGES, seeds=(0, 1), finite=True):
    """A run of images in a folder with the files of a tuning: lr 0.1 was better than 0.05 by 2 points."""
    targets = ("birds", "cars", "flowers")
    runner_up = {"number": 1, "lr": 0.05, "damping": 1e-4, "validation": 41.0, "kept": 2, "seconds": 1.0}
    best = {"lr": 0.1, "damping": 1e-4, "validation": 43.0, "runner_up": runner_up, "trials": 3, "diverged": 1}
    why = "best of 3, by 2.00 points; 1 diverged"
    choices = [{"line": "xkfac", "seed": s, "task": task, **best, "why": why} for s in seeds for task in targets]
    tried = ((0.1, 42.0, 52.0), (0.05, 40.0, 50.0), (0.02, 30.0, 45.0), (0.5, None, None))
    fixed = {"label": "XK-FAC", "balanced": False, "damping": 1e-4}
    points = [
        {"task": task, **fixed, "lr": lr, "chosen": lr == 0.1}
        | ({"target": target, "average": mean} if finite else {"target": None, "average": None})
        for task in targets
        for lr, target, mean in tried
    ]
    folder.mkdir(parents=True)
    (folder / "choices.json").write_text(json.dumps(choices))
    (folder / "points.json").write_text(json.dumps(points))
    return images(*jobs, text=text, folder=str(folder), provenance={**PROVENANCE, "tuning": {"id": "a"}})


def large(lines=25, repeats=4, tasks=50, epochs=15, folder="runs/large"):
    """As many lines as the largest experiment has, of all kinds, shaped like real curves, one that diverges."""
    methods = ["xkfac", "kfac", "corrected", "diagonal", "fine-tuning"]
    names = [f"line-{i}" for i in range(lines)]
    text = [
        'title = "Permuted MNIST, 50 tasks"',
        'description = "A made-up run of the size of the largest experiment: 25 lines, four repeats, fifty tasks."',
        f"repeats = {repeats}",
        f"[defaults]\ntasks = {tasks}\nepochs = {epochs}",
    ]
    jobs = []
    for i, name in enumerate(names):
        method = "joint" if i == lines - 1 else methods[i % 5]
        kinds = {"xkfac": "XK-FAC", "kfac": "K-FAC", "joint": "Joint training"}
        label = f"{kinds.get(method, method)}, BN read as {('BRN', 'BN', 'constant')[i % 3]}, λ = 1e-{i}"
        text.append(f'[lines.{name}]\nlabel = "{label}"\nmethod = "{method}"')
        text.append(f'note = "variant {i} of {method}"')
        if method == "joint":
            at = [count for count in (5, 10, 20, 50) if count <= tasks] or [tasks]
            text.append(f"at = {at}")
            jobs += [joint(name, 0.1 * seed - 0.4, at) for seed in range(repeats)]
            continue
        jobs += [
            _shaped(name, i, seed, tasks, epochs, diverged=min(23, tasks - 1) if i == 8 else None)
            for seed in range(repeats)
        ]
    half = [f'"{name}"' for name in names[:12]] + [f'"{names[-1]}"']
    rest = [f'"{name}"' for name in names[12:]]
    text.append(f'[figures.a]\ntitle = "Interpretations of BN"\nlines = [{", ".join(half)}]')
    text.append(f'[figures.b]\ntitle = "Effect of damping"\nlines = [{", ".join(rest)}]')
    return run("\n".join(text), jobs, folder)


def _shaped(name, i, seed, tasks, epochs, diverged):
    fall = 0.02 * (1 + i % 7) * (12 if i % 5 == 4 else 1 + (i % 5) / 2)
    made = job(name, seed, tasks, epochs=epochs, diverged=diverged, penalised=i % 5 != 4)

    def noise(*place):  # smooth enough to look real, the same on every machine
        return math.sin(sum((k + 1) * 12.9898 * p for k, p in enumerate(place))) * 0.4

    rows = [
        [
            max(10.0, 97.5 - fall * (t - j) ** 0.9 * (1 + 0.12 * noise(seed, i)) + noise(i, seed, t, j))
            for j in range(t + 1)
        ]
        for t in range(len(made.accuracy))
    ]
    epoch_rows = [
        {**e, "loss": 0.4 / (1 + e["epoch"]) + 0.03 + 0.01 * abs(noise(i, e["task"], e["epoch"], seed)),
         "penalty": e["penalty"] * (1 + noise(i, e["epoch"], e["task"])) * 0.1 / (1 + e["epoch"])}
        for e in made.epochs
    ]  # fmt: skip
    return replace(made, accuracy=rows, epochs=epoch_rows)


def write(run, path):
    """Write a made-up run as the folder that a real one would have left; return the folder."""
    folder = RunFolder.create(path, run.recipe, {**run.provenance, "place": "cpu", "data": None})
    for made in (job for line in run.lines.values() for job in line.jobs if job.accuracy):
        note = folder.job(made.line, made.seed).note
        note("start", line=made.line, seed=made.seed, untrained=made.untrained, tasks=list(made.tasks))
        for task, row in enumerate(made.accuracy):
            for epoch in (epoch for epoch in made.epochs if epoch["task"] == task):
                note("epoch", **epoch)
            before = made.before[task - made.known] if task >= made.known else None
            note("task", task=task, accuracy=row, before=before, kept=made.kept[task], seconds=made.seconds[task])
        if made.done:
            note("end", diverged=made.diverged)
    return folder
