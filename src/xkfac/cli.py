"""The xkfac command: run experiments, go on with them, look at them.

Exit codes: 0 all went well, 1 a run stopped before its end, 2 something that was asked for cannot be done,
130 interrupted.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from xkfac.errors import XkfacError

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as error:  # the library itself needs neither
    raise SystemExit(f"the xkfac command needs more packages ({error}): pip install 'xkfac[experiments]'") from None

app = typer.Typer(
    name="xkfac",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Continual learning for networks with batch normalization: run the experiments, go on with them, see them.",
    epilog="Exit codes: 0 all went well, 1 a run stopped before its end, 2 what was asked for cannot be done, "
    "130 interrupted.",
    pretty_exceptions_enable=False,
)


def _recipe_names(incomplete: str) -> list[str]:
    from xkfac.experiments.parsing import named_recipes

    return [name for name in named_recipes() if name.startswith(incomplete)]


def _run_names(incomplete: str) -> list[str]:
    from xkfac.experiments.folder import find_runs

    return [str(path) for path in find_runs(Path("runs")) if str(path).startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="The name of a recipe (`xkfac recipe` lists them) or the path of a TOML file.",
        autocompletion=_recipe_names,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", autocompletion=_run_names)]
RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", autocompletion=_run_names)]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Jobs side by side; by default one for each core.")
]
Device = Annotated[str, typer.Option(help="`cpu`, `cuda`, or `auto`: a GPU if there is one.")]
DataFolder = Annotated[Path | None, typer.Option("--data", envvar="XKFAC_DATA", help="The folder that holds the data.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result to standard output as JSON, and nothing else.")]


def main() -> None:
    """Run the command; an error that a user can mend is one sentence and exit code 2."""
    try:
        app()
    except XkfacError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _exit_code(error: XkfacError) -> int:
    """Return 1 for a run that stopped before its end, and can be gone on with, 2 for all else."""
    from xkfac.experiments.folder import NotWritten
    from xkfac.experiments.running import JobsFailed

    return 1 if isinstance(error, JobsFailed | NotWritten) else 2


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: null in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="The folder for the run and its report.")] = Path("demo-output"),
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run the demo on scikit-learn's digits: a table, a figure and a report, in a few minutes.

    A demo that was interrupted is gone on with; one that is there already is shown again.
    """
    from xkfac.experiments import results, resume, start

    run = output / "run"
    if (run / "run.json").exists():
        found = results(run)
        if not all(job.done for line in found.lines.values() for job in line.jobs):
            _tell(quiet or as_json, f"going on with '{run}'")
            _with_progress(run, quiet or as_json, lambda show: resume(run, jobs=jobs, show=show))
        else:
            _tell(quiet or as_json, f"'{run}' is complete; remove '{output}' to run the demo again")
    else:
        _with_progress(run, quiet or as_json, lambda show: start("demo", run, jobs=jobs, device="cpu", show=show))
    _finish([run], output, as_json)


@app.command()
def run(
    recipe: RecipeName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the run; by default runs/RECIPE.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key, e.g. `defaults.epochs=2`, `repeats=1`."),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option("--line", "-l", metavar="NAME", help="Run these lines alone; `kfac-*` works too."),
    ] = None,
    jobs: Jobs = None,
    device: Device = "auto",
    data: DataFolder = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data if it is not there.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe in a new folder; interrupt it at will, and go on with `xkfac resume`."""
    from xkfac.experiments import load_recipe, start

    made = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / made.name
    _with_progress(
        folder,
        quiet or as_json,
        lambda show: start(
            made, folder, lines=lines or (), jobs=jobs, device=device, data=data, download=download, show=show
        ),
    )
    _finish([folder], folder / "report", as_json)


@app.command()
def resume(run: RunPath, jobs: Jobs = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Go on with a run that was interrupted; its numbers are those of an unbroken run."""
    from xkfac.experiments import resume as go_on
    from xkfac.experiments.folder import RunFolder

    if "tuning" in RunFolder.open(run).facts:
        from xkfac.experiments.tuning import go_on as go_on_tuning

        _tune(run, quiet, as_json, lambda show: go_on_tuning(RunFolder.open(run), jobs=jobs, show=show))
        return
    _with_progress(run, quiet or as_json, lambda show: go_on(run, jobs=jobs, show=show))
    _finish([run], run / "report", as_json)


@app.command()
def tune(
    recipe: RecipeName,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder, new or begun; by default runs/RECIPE-tuned."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key, e.g. `defaults.epochs=2`, `repeats=1`."),
    ] = None,
    lines: Annotated[
        list[str] | None,
        typer.Option("--line", "-l", metavar="NAME", help="Tune these lines alone; `kfac-*` works too."),
    ] = None,
    jobs: Jobs = None,
    device: Device = "auto",
    data: DataFolder = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the data if it is not there.")] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="A database or a journal file for Optuna; by default a journal in the folder."
        ),
    ] = None,
    scatter: Annotated[
        bool, typer.Option(help="Keep the weights of every trial until all is chosen, and measure them too.")
    ] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose the learning rate and damping of every task from the grids of a recipe, without source data.

    Task by task, the setting with the best accuracy on the validation split of the target alone is chosen. Several
    processes and machines can work on one folder. Interrupt it at will; the same command, or `xkfac resume`, goes on.
    """
    from xkfac.experiments import load_recipe
    from xkfac.experiments.tuning import tune as choose

    made = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / f"{made.name}-tuned"
    where: dict[str, Any] = {"device": device, "data": data, "download": download, "storage": storage}
    _tune(
        folder,
        quiet,
        as_json,
        lambda show: choose(made, folder, lines=lines or (), jobs=jobs, scatter=scatter, show=show, **where),
    )


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A run, or a folder of runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs: which are complete, running or interrupted, and how far they are."""
    from xkfac.experiments.folder import find_runs
    from xkfac.experiments.progress import Standing

    found = [Standing.of(path) for path in find_runs(folder)]
    if as_json:
        _print_json([standing.to_dict() for standing in found])
    elif not found:
        print(f"no runs in '{folder}'; 'xkfac run RECIPE' starts one")
    else:
        table = Table("run", "recipe", "state", "jobs", "epochs", "average accuracy", box=None, pad_edge=False)
        for standing in found:
            table.add_row(*map(escape, standing.cells()))
        _console().print(table)


@app.command()
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
    _finish(runs, output or runs[0] / "report", as_json)


@app.command()
def compare(runs: RunPaths, as_json: AsJson = False) -> None:
    """Compare lines of the same name in several runs: differences of average accuracy with confidence intervals."""
    from dataclasses import asdict

    from xkfac.experiments import results
    from xkfac.experiments.tables import compare as compared
    from xkfac.experiments.tables import number

    if len(runs) < 2:
        raise XkfacError("compare needs the folders of at least two runs; 'xkfac report' shows a single one")
    rows = compared([results(path) for path in runs])
    if not rows:
        raise XkfacError("the runs have no line of the same name with results in both; there is nothing to compare")
    if as_json:
        _print_json([asdict(row) for row in rows])
        return
    table = Table("line", "tasks", "first", "second", "difference", "95% interval", box=None, pad_edge=False)
    for row in rows:
        interval = "-" if row.low != row.low else f"{row.low:+.2f} to {row.high:+.2f}"
        cells = (row.label, str(row.tasks), number(row.first), number(row.second), f"{row.difference:+.2f}", interval)
        table.add_row(*map(escape, cells))
    _console().print(table)


@app.command()
def inspect(
    memory: Annotated[Path, typer.Argument(metavar="MEMORY_FILE", help="A file that `Memory.save` wrote.")],
    batch: Annotated[
        int | None,
        typer.Option(min=2, help="The size of the mini-batches it was made with; the paper's form needs it for K-FAC."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of what is estimated from drawn entries.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show what a memory file holds: its method, the spectra of its units, K-FAC against XK-FAC, its calibration.

    A bar of a spectrum is a decade of eigenvalues, the largest first; its height is the logarithm of their number.
    """
    from rich.status import Status

    from xkfac.experiments.inspection import calibration_table, facts, inspect_memory, unit_table

    error = Console(stderr=True)
    with Status("reading the memory", console=error) if error.is_terminal else nullcontext() as status:

        def show(done: int, total: int, unit: str) -> None:
            if status is not None:
                status.update(f"unit {done + 1} of {total}: {escape(unit)}")

        found = inspect_memory(memory, batch=batch, seed=seed, show=show)
    if as_json:
        _print_json(found)
        return
    console = _console()
    for name, value in facts(found).items():
        console.print(f"[bold]{name}[/]: {escape(value)}", highlight=False)
    for head, *rows in filter(None, (calibration_table(found), unit_table(found))):
        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print()
        console.print(table)


@app.command()
def pretrain(
    tree: Annotated[str, typer.Argument(metavar="TREE", help="An image tree, a folder or a zip, in the data folder.")],
    weights: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="The .safetensors file to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a setting, e.g. `epochs=30`, `stem=small`."),
    ] = None,
    task: Annotated[str, typer.Option(help="What the task is called.")] = "source",
    data: DataFolder = None,
    device: Device = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Processes that decode images.")] = 1,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a source network on an image tree; interrupt it at will, the same command goes on."""
    from xkfac.experiments.pretraining import Pretraining
    from xkfac.experiments.pretraining import pretrain as train
    from xkfac.experiments.toml import settings_of

    silent = quiet or as_json

    def tell(epoch: Any) -> None:
        held_out = "" if epoch.validation is None else f", validation {epoch.validation:.2f}%"
        _tell(silent, f"epoch {epoch.epoch}/{epoch.epochs}: loss {epoch.loss:.4f}{held_out}, {epoch.seconds:.1f} s")

    made = settings_of(Pretraining, settings or ())
    found = train(tree, weights, made, task=task, folder=data, device=device, workers=workers, progress=tell)
    if as_json:
        _print_json({"weights": str(found.weights), "validation": found.validation, "test": found.test})
        return
    print(f"{len(found.classes)} classes, {found.test:.2f}% on the test part\nweights: {found.weights}")


@app.command()
def recipe(
    name: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe's name.", autocompletion=_recipe_names)
    ] = None,
) -> None:
    """List the recipes that come with xkfac, or print one, to be copied and edited."""
    from xkfac.experiments.parsing import load_recipe, named_recipes

    if name is None:
        table = Table("recipe", "lines", "repeats", "title", box=None, pad_edge=False)
        for each in named_recipes():
            made = load_recipe(each)
            table.add_row(each, str(len(made.lines)), str(made.repeats), escape(made.title))
        _console().print(table)
        return
    load_recipe(name)
    text = named_recipes().get(name)
    print(Path(name).read_text(encoding="utf-8") if text is None else text, end="")


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Show the version, if asked for."""
    if version:
        import xkfac

        print(f"xkfac {xkfac.__version__}")
        raise typer.Exit


def _console() -> Console:
    """Return the console of results; what goes elsewhere than to a terminal is not fitted into its width."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 500)


def _tell(quiet: bool, text: str) -> None:
    if not quiet:
        Console(stderr=True, soft_wrap=True).print(escape(text))


def _with_progress(folder: Path, quiet: bool, work: Callable[[Any], Any]) -> None:
    """Do the work of a run with live progress; an interrupt says how to go on."""
    from xkfac.experiments.progress import Display

    try:
        with Display(None if quiet else Console(stderr=True)) as display:
            work(display.show)
    except KeyboardInterrupt:
        if (folder / "run.json").exists():
            _tell(False, f"interrupted; go on with: xkfac resume {shlex.quote(str(folder))}")
        raise


def _tune(folder: Path, quiet: bool, as_json: bool, work: Callable[[Any], Any]) -> None:
    """Do the work of a tuning with live progress, say what was chosen and why, and write the report."""
    from xkfac.experiments.tuning import COLUMNS, TuningDisplay

    try:
        with TuningDisplay(None if quiet or as_json else Console(stderr=True)) as display:
            found = work(display.show)
    except KeyboardInterrupt:
        if (folder / "run.json").exists():
            _tell(False, f"interrupted; go on with: xkfac resume {shlex.quote(str(folder))}")
        raise
    if as_json:
        _print_json({"choices": str(folder / "choices.json"), "chosen": [each.to_dict() for each in found]})
        return
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for each in found:
        table.add_row(*map(escape, each.cells()))
    console = _console()
    console.print(table)
    console.print(f"\nchosen by accuracy in % on the validation split of each target: {folder / 'choices.json'}\n")
    _finish([folder], folder / "report", as_json=False)


def _finish(folders: list[Path], output: Path, as_json: bool) -> None:
    """Write the report of runs and show the table and where things are."""
    from xkfac.experiments import results
    from xkfac.experiments.report import write_report
    from xkfac.experiments.results import pooled
    from xkfac.experiments.tables import summary_text

    runs = pooled([results(folder) for folder in folders])
    page = write_report(runs, output)
    figures = [str(path) for path in sorted((output / "figures").glob("*.png"), key=lambda path: path.stem)]
    if as_json:
        lines = {
            f"{run.recipe.name}/{name}": [job.to_dict() for job in line.jobs]
            for run in runs
            for name, line in run.lines.items()
        }
        _print_json({"report": str(page), "figures": figures, "jobs": lines})
        return
    head, *rows = summary_text(runs)
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    console = _console()
    console.print(table)
    console.print("\naccuracy in %, mean ± standard deviation over repeats")
    for figure in figures[:1]:
        console.print(f"figure: {figure}")
    console.print(f"report: {page}")


if __name__ == "__main__":
    main()
