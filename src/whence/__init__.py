"""whence: which training examples made a model say that, and how sure are we?

The steps of an attribution, each usable alone::

    gnh      = whence.GaussNewton(model, task, train_set)          # a LinearOperator
    spectrum = whence.estimate_spectrum(gnh, generator=g)          # trace, Frobenius, λmax, each ± error
    plan     = whence.Plan.from_spectrum(spectrum, damping=5.0)    # η, |B|, T, predicted error and cost
    solution = whence.Lissa(plan).solve(whence.Damped(gnh, 5.0), rhs, generator=g)
"""

from whence import errors
from whence.allocator import keep_freed_memory
from whence.gauss_newton import GaussNewton
from whence.operators import Damped, Dense, FiniteSum, LinearOperator
from whence.plan import Plan
from whence.solvers import Lissa, Solution, Solver
from whence.spectrum import Estimate, Spectrum, estimate_spectrum, lanczos, sketch
from whence.tasks import Classification, ConvexLoss, LanguageModeling, Regression, Task
from whence.vectors import ParamVector

__all__ = [
    "Classification",
    "ConvexLoss",
    "Damped",
    "Dense",
    "Estimate",
    "FiniteSum",
    "GaussNewton",
    "LanguageModeling",
    "LinearOperator",
    "Lissa",
    "ParamVector",
    "Plan",
    "Regression",
    "Solution",
    "Solver",
    "Spectrum",
    "Task",
    "errors",
    "estimate_spectrum",
    "keep_freed_memory",
    "lanczos",
    "sketch",
]
__version__ = "0.1.0.dev0"
