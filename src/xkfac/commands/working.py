"""Commands that work: they train, choose and measure, and leave a run with its report, or a source network."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from xkfac.commands.arguments import (
    AsJson,
    DataFolder,
    Device,
    Download,
    Jobs,
    LineNames,
    Quiet,
    RecipeName,
    RecipeSettings,
    RunPath,
)
from xkfac.commands.output import finish, print_json, print_table, progress, tell


def demo(
    output: Annotated[Path, typer.Option(help="The folder for the run and its report.")] = Path("demo-output"),
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run the demo on scikit-learn's digits: a table, a figure and a report, in a few minutes.

    A demo that was interrupted is resumed; one that is there already is shown again.
    """
    from xkfac.experiments import resume, start
    from xkfac.experiments.files import check_path

    run, silent = check_path(output / "run"), quiet or as_json
    if there := (run / "run.json").exists():
        tell(silent, f"'{run}' is there already and is resumed; remove '{output}' to run the demo anew")
    with progress(run, silent) as show:
        if there:
            resume(run, jobs=jobs, show=show)
        else:
            start("demo", run, jobs=jobs, device="cpu", show=show)
    finish([run], output, as_json)


def run(
    recipe: RecipeName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the run; by default runs/RECIPE.")
    ] = None,
    settings: RecipeSettings = None,
    lines: LineNames = None,
    jobs: Jobs = None,
    device: Device = "auto",
    data: DataFolder = None,
    download: Download = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe in a new folder; interrupt it at will, and go on with `xkfac resume`."""
    from xkfac.experiments import load_recipe, start

    loaded = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / loaded.name
    with progress(folder, quiet or as_json) as show:
        start(loaded, folder, lines=lines or (), jobs=jobs, device=device, data=data, download=download, show=show)
    finish([folder], folder / "report", as_json)


def resume(run: RunPath, jobs: Jobs = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Go on with a run that was interrupted; its numbers are those of an unbroken run."""
    from xkfac.experiments import resume as go_on
    from xkfac.experiments.runs.folder import RunFolder

    if "tuning" in RunFolder.open(run).facts:
        from xkfac.experiments.tuning.tuning import go_on as go_on_tuning

        with progress(run, quiet or as_json, tuning=True) as show:
            chosen = go_on_tuning(RunFolder.open(run), jobs=jobs, show=show)
        _finish_tuning(run, chosen, as_json)
        return
    with progress(run, quiet or as_json) as show:
        go_on(run, jobs=jobs, show=show)
    finish([run], run / "report", as_json)


def tune(
    recipe: RecipeName,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder, new or begun; by default runs/RECIPE-tuned."),
    ] = None,
    settings: RecipeSettings = None,
    lines: LineNames = None,
    jobs: Jobs = None,
    device: Device = "auto",
    data: DataFolder = None,
    download: Download = False,
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
    from xkfac.experiments.tuning.tuning import tune as choose

    loaded = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / f"{loaded.name}-tuned"
    where: dict[str, Any] = {"device": device, "data": data, "download": download}
    with progress(folder, quiet or as_json, tuning=True) as show:
        chosen = choose(loaded, folder, lines=lines or (), jobs=jobs, scatter=scatter, show=show, **where)
    _finish_tuning(folder, chosen, as_json)


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
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Processes that decode images.")] = 1,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a source network on an image tree; interrupt it at will, the same command goes on."""
    from xkfac.experiments.networks.pretrainer import Pretraining
    from xkfac.experiments.networks.pretraining import Epoch
    from xkfac.experiments.networks.pretraining import pretrain as train
    from xkfac.experiments.recipes.toml_tables import settings_of

    silent = quiet or as_json

    def show(epoch: Epoch) -> None:
        held_out = "" if epoch.validation is None else f", validation {epoch.validation:.2f}%"
        tell(silent, f"epoch {epoch.epoch}/{epoch.epochs}: loss {epoch.loss:.4f}{held_out}, {epoch.seconds:.1f} s")

    how = settings_of(Pretraining, settings or ())
    result = train(tree, weights, how, task=task, folder=data, device=device, workers=workers, progress=show)
    if as_json:
        print_json({"weights": str(result.weights), "validation": result.validation, "test": result.test})
        return
    print(f"{len(result.classes)} classes, {result.test:.2f}% on the test part\nweights: {result.weights}")


def _finish_tuning(folder: Path, found: list[Any], as_json: bool) -> None:
    """Say what a tuning chose, its `ChoiceEntry`s, and write the report."""
    from xkfac.experiments.tuning.trials import CHOICE_COLUMNS

    if as_json:
        print_json({"choices": str(folder / "choices.json"), "chosen": [asdict(choice) for choice in found]})
        return
    print_table(CHOICE_COLUMNS, [choice.cells() for choice in found])
    print(f"\nchosen by accuracy in % on the validation split of each target: {folder / 'choices.json'}\n")
    finish([folder], folder / "report", as_json=False)
