"""Experiments: recipes, runs that can be interrupted, results, figures and reports."""

from xkfac.experiments.recipes.parsing import load_recipe, named_recipes
from xkfac.experiments.recipes.recipe import Data, Figure, Images, Line, Recipe, Task
from xkfac.experiments.recipes.toml_tables import RecipeError
from xkfac.experiments.runs.job_folder import RunError
from xkfac.experiments.runs.results import JobResult, LineResults, RunResults, Spread
from xkfac.experiments.runs.running import JobsFailed, results, resume, start

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
