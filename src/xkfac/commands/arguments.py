"""Arguments and options that several commands share, and what completes them in a shell."""

from pathlib import Path
from typing import Annotated

import typer


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipes whose name begins so."""
    from xkfac.experiments.recipes.parsing import named_recipes

    return [name for name in named_recipes() if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    """Return the runs in the folder `runs` whose path begins so."""
    from xkfac.experiments.runs.folder import find_runs

    return [str(path) for path in find_runs(Path("runs")) if str(path).startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="The name of a recipe (`xkfac recipe` lists them) or the path of a TOML file.",
        autocompletion=recipe_names,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", autocompletion=run_names)]
RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", autocompletion=run_names)]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Jobs side by side; by default one for each core.")
]
Device = Annotated[str, typer.Option(help="`cpu`, `cuda`, or `auto`: a GPU if there is one.")]
DataFolder = Annotated[Path | None, typer.Option("--data", envvar="XKFAC_DATA", help="The folder that holds the data.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result to standard output as JSON, and nothing else.")]
RecipeSettings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key, e.g. `defaults.epochs=2`, `repeats=1`."),
]
LineNames = Annotated[
    list[str] | None,
    typer.Option("--line", "-l", metavar="NAME", help="Take these lines alone; `kfac-*` works too."),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch the data if it is not there.")]
