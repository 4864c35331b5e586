"""Experiments: recipes, runs that can be interrupted, results, figures and reports."""

from xkfac.experiments.folder import RunError
from xkfac.experiments.parsing import load_recipe, named_recipes
from xkfac.experiments.recipe import Data, Figure, Images, Line, Recipe, Task
from xkfac.experiments.results import JobResult, LineResults, RunResults, Spread
from xkfac.experiments.running import JobsFailed, results, resume, start
from xkfac.experiments.toml import RecipeError

__all__ = [
    "Data",
    "Figure",
    "Images",
    "JobResult",
    "JobsFailed",
    "Line",
    "LineResults",
    "Recipe",
    "RecipeError",
    "RunError",
    "RunResults",
    "Spread",
    "Task",
    "load_recipe",
    "named_recipes",
    "results",
    "resume",
    "start",
]
