"""whence: which training examples made a model say that, and how sure are we?

One call from a question to an answer::

    result = whence.attribute(model, train_set, queries, task=whence.LanguageModeling())
    result.top(5)                    # query, rank, index, score, low, high, removal effect in nats
    result.to_html("report.html")    # the page to send to a colleague

The steps it is made of, each usable alone::

    gnh      = whence.GaussNewton(model, task, train_set)          # a LinearOperator
    spectrum = whence.estimate_spectrum(gnh, generator=g)          # trace, Frobenius, λmax, each ± error
    plan     = whence.Plan.from_spectrum(spectrum, damping=5.0)    # η, |B|, T, predicted error and cost
    solution = whence.Lissa(plan).solve(whence.Damped(gnh, 5.0), rhs, generator=g)
"""

from whence import errors
from whence.attribution import Attribution, attribute, load
from whence.cleaning import Cleaning, clean
from whence.exhibit import Exhibit
from whence.index import Answer, Index, index
from whence.model.gauss_newton import GaussNewton
from whence.model.memory import keep_freed_memory
from whence.operators import Damped, Dense, FiniteSum, LinearOperator
from whence.options import AskOptions, CleanOptions, IndexOptions, Options
from whence.scoring.similarity import gradient_similarity, influence_similarity
from whence.solvers import Certificate, ConjugateGradient, Lissa, Solution, Solver, Statistics
from whence.solvers.plan import Plan
from whence.spectrum import Estimate, Spectrum, estimate_spectrum, lanczos, sketch
from whence.tasks import (
    BinaryClassification,
    Classification,
    ConvexLoss,
    LanguageModeling,
    MaskedLanguageModeling,
    Preference,
    Questions,
    Regression,
    SequenceToSequence,
    Task,
    TokenClassification,
)
from whence.training import Training
from whence.validation import Tuning, linear_datamodeling_score, pbrf, tune, validate
from whence.vectors import ParamVector

__all__ = [
    "Answer",
    "AskOptions",
    "Attribution",
    "BinaryClassification",
    "Certificate",
    "Classification",
    "CleanOptions",
    "Cleaning",
    "ConjugateGradient",
    "ConvexLoss",
    "Damped",
    "Dense",
    "Estimate",
    "Exhibit",
    "FiniteSum",
    "GaussNewton",
    "Index",
    "IndexOptions",
    "LanguageModeling",
    "LinearOperator",
    "Lissa",
    "MaskedLanguageModeling",
    "Options",
    "ParamVector",
    "Plan",
    "Preference",
    "Questions",
    "Regression",
    "SequenceToSequence",
    "Solution",
    "Solver",
    "Spectrum",
    "Statistics",
    "Task",
    "TokenClassification",
    "Training",
    "Tuning",
    "attribute",
    "clean",
    "errors",
    "estimate_spectrum",
    "gradient_similarity",
    "index",
    "influence_similarity",
    "keep_freed_memory",
    "lanczos",
    "linear_datamodeling_score",
    "load",
    "pbrf",
    "sketch",
    "tune",
    "validate",
]
__version__ = "0.1.0"
