"""Continual learning for networks with batch normalization by extended Kronecker-factored curvature (XK-FAC)."""

from xkfac.calibration import Calibration
from xkfac.curvature.estimate import estimate
from xkfac.curvature.operator import Settings
from xkfac.errors import MemoryFileError, MismatchError, NotFiniteError, UnitError, XkfacError, XkfacWarning
from xkfac.learning.balance import Balance
from xkfac.learning.calibrator import calibrate
from xkfac.learning.learner import Learner
from xkfac.memory import Memory, consolidate
from xkfac.methods import METHODS, Method
from xkfac.model.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from xkfac.model.renorm import BatchRenorm1d, BatchRenorm2d, BatchRenorm3d, to_batchnorm, to_renorm
from xkfac.model.units import find_units
from xkfac.pretrained import load_pretrained, save_pretrained
from xkfac.routing.batch_statistics import batch_statistics
from xkfac.routing.router import Router
from xkfac.task_layers import TaskLayer, enter_task, give_task_layers, give_task_norms, using_task

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022, grouped by what they are for
    # learn without forgetting
    "consolidate",
    "Memory",
    "Learner",
    "calibrate",
    "Calibration",
    "Balance",
    "save_pretrained",
    "load_pretrained",
    # choose and look into methods
    "METHODS",
    "Method",
    "Settings",
    "estimate",
    "find_units",
    # what outputs mean
    "Likelihood",
    "Categorical",
    "Bernoulli",
    "Gaussian",
    # layers that belong to one task
    "TaskLayer",
    "give_task_layers",
    "give_task_norms",
    "enter_task",
    "using_task",
    "Router",
    "batch_statistics",
    # batch renormalization
    "BatchRenorm1d",
    "BatchRenorm2d",
    "BatchRenorm3d",
    "to_renorm",
    "to_batchnorm",
    # what can go wrong
    "XkfacError",
    "UnitError",
    "NotFiniteError",
    "MismatchError",
    "MemoryFileError",
    "XkfacWarning",
]
