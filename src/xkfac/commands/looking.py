"""Commands that look at what is there: runs, memories and recipes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from xkfac.commands.arguments import AsJson, RunPaths, recipe_names
from xkfac.commands.output import console, finish, print_json, print_table
from xkfac.errors import XkfacError


def status(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A run, or a folder of runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs: which are complete, running or interrupted, and how far they are."""
    from dataclasses import asdict

    from xkfac.experiments.runs.folder import find_runs
    from xkfac.experiments.runs.progress import RunStatus

    runs = [RunStatus.of(path) for path in find_runs(folder)]
    if as_json:
        print_json([asdict(run) for run in runs])
    elif not runs:
        print(f"no runs in '{folder}'; 'xkfac run RECIPE' starts one")
    else:
        head = ("run", "recipe", "state", "jobs", "epochs", "average accuracy")
        print_table(head, [run.cells() for run in runs])
        for run in runs:
            if run.reason:
                console().print(f"damaged: {run.reason}", markup=False, highlight=False)


def report(
    runs: RunPaths,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the report; by default RUN/report.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of one or more runs: a page, and each figure as PNG, SVG and CSV.

    Runs of one recipe that differ in their seeds count as repeats.
    """
    finish(runs, output or runs[0] / "report", as_json)


def compare(runs: RunPaths, as_json: AsJson = False) -> None:
    """Compare lines of the same name in several runs: differences of average accuracy with confidence intervals."""
    from dataclasses import asdict

    from xkfac.experiments import results
    from xkfac.experiments.report.comparison import compare as compared
    from xkfac.experiments.report.comparison import comparison_table
    from xkfac.experiments.report.lines import report_runs

    if len(runs) < 2:
        raise XkfacError("compare needs the folders of at least two runs; 'xkfac report' shows a single one")
    rows = compared(report_runs([results(path) for path in runs]))
    if not rows:
        raise XkfacError("the runs have no line of the same name with results in both; there is nothing to compare")
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(*comparison_table(rows).texts())
    print("\naverage accuracy in %; a * where the interval excludes zero")


def inspect(
    memory: Annotated[Path, typer.Argument(metavar="MEMORY_FILE", help="A file that `Memory.save` wrote.")],
    batch: Annotated[
        int | None,
        typer.Option(
            min=2, max=10**9, help="The size of the mini-batches it was made with; the paper's form needs it for K-FAC."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**53, help="The seed of what is estimated from drawn entries.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw spectra and shares of H'' of all units to this file (.png, .svg, .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a memory file holds: its method, the spectra of its units, K-FAC against XK-FAC, its calibration.

    A bar of a spectrum is a decade of eigenvalues, the largest first; its height is the logarithm of their number.
    """
    from rich.status import Status

    from xkfac.experiments.files import check_path
    from xkfac.experiments.inspect.inspection import calibration_table, facts, inspect_memory, unit_table

    check_path(memory)
    with Status("reading the memory", console=Console(stderr=True)) as status:  # which only a terminal shows

        def show(done: int, total: int, unit: str) -> None:
            status.update(f"unit {done + 1} of {total}: {escape(unit)}")

        found = inspect_memory(memory, batch=batch, seed=seed, show=show)
    if plot is not None:
        from xkfac.experiments.inspect.picture import draw

        draw(found, plot)
    if as_json:
        print_json(found)
        return
    for name, value in facts(found).items():
        console().print(f"[bold]{name}[/]: {escape(value)}", highlight=False)
    for head, *rows in filter(None, (calibration_table(found), unit_table(found))):
        print()
        print_table(head, rows)


def card(
    memory: Annotated[Path, typer.Argument(metavar="MEMORY_FILE", help="A file that `Memory.save` wrote.")],
) -> None:
    """Print a model card of a memory file in Markdown, with the header that the Hugging Face hub reads."""
    from xkfac.experiments.files import check_path
    from xkfac.memory import Memory
    from xkfac.pretrained import card as card_of

    check_path(memory)
    print(card_of(Memory.load(memory)), end="")


def recipe(
    name: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe's name.", autocompletion=recipe_names)
    ] = None,
) -> None:
    """List the recipes that come with xkfac, or print one, to be copied and edited."""
    from xkfac.experiments.recipes.parsing import load_recipe, named_recipes

    if name is None:
        recipes = {each: load_recipe(each) for each in named_recipes()}
        rows = [(each, str(len(one.lines)), str(one.repeats), one.title) for each, one in recipes.items()]
        print_table(("recipe", "lines", "repeats", "title"), rows)
        return
    load_recipe(name)
    text = named_recipes().get(name)
    print(Path(name).read_text(encoding="utf-8") if text is None else text, end="")
