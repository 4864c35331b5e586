"""Continual learning for networks with batch normalization by extended Kronecker-factored curvature (XK-FAC)."""

from xkfac.balance import Balance
from xkfac.calibrating import calibrate
from xkfac.calibration import Calibration
from xkfac.curvature import Curvature, Settings
from xkfac.errors import MemoryFileError, MismatchError, NotFiniteError, UnitError, XkfacError, XkfacWarning
from xkfac.estimation import Estimate, estimate
from xkfac.learner import Learner
from xkfac.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from xkfac.memory import Memory, consolidate
from xkfac.merging import recentre
from xkfac.methods import METHODS, Method
from xkfac.penalty import Penalty
from xkfac.renorm import BatchRenorm1d, BatchRenorm2d, BatchRenorm3d, to_batchnorm, to_renorm
from xkfac.tasklayers import (
    TaskLayer,
    enter_task,
    give_task_layers,
    give_task_norms,
    load_norm_state,
    norm_state,
    using_task,
)
from xkfac.telling import TaskTeller
from xkfac.units import Coverage, Unit, find_units

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Balance",
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "Bernoulli",
    "Calibration",
    "Categorical",
    "Coverage",
    "Curvature",
    "Estimate",
    "Gaussian",
    "Learner",
    "Likelihood",
    "Memory",
    "MemoryFileError",
    "Method",
    "MismatchError",
    "NotFiniteError",
    "Penalty",
    "Settings",
    "TaskLayer",
    "TaskTeller",
    "Unit",
    "UnitError",
    "XkfacError",
    "XkfacWarning",
    "calibrate",
    "consolidate",
    "enter_task",
    "estimate",
    "find_units",
    "give_task_layers",
    "give_task_norms",
    "load_norm_state",
    "norm_state",
    "recentre",
    "to_batchnorm",
    "to_renorm",
    "using_task",
]
