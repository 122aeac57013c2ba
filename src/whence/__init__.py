"""whence: which training examples made a model say that, and how sure are we?"""

from whence.gauss_newton import GaussNewton
from whence.operators import Damped, Dense, FiniteSum, LinearOperator
from whence.tasks import Classification, ConvexLoss, LanguageModeling, Regression
from whence.vectors import ParamVector
