"""Everything whence raises on purpose, in one tree.

::

    WhenceError
    ├── InputError (ValueError)          something the caller gave; raised before the long work starts
    │   ├── OptionError                  a setting: damping ≤ 0, an unknown product, a batch above the data
    │   ├── ModelError                   the model: training mode, random outputs, unreadable outputs
    │   ├── ParameterSelectionError      the parameter filter selects nothing it could select
    │   ├── DataError                    an example: NaN, label out of range, shapes that do not stack
    │   ├── VectorError                  a vector that belongs to another model
    │   └── RunDirectoryError            a run directory of another configuration or format
    ├── SolverError (RuntimeError)       the numbers went wrong during the work
    │   └── DivergenceError              a stochastic solve blew up; says why and what to change
    ├── RankError (RuntimeError)         another process of the run was lost, or was asked something else
    └── StorageError (RuntimeError)      a file could not be written: full disk, no permission

    WhenceWarning (UserWarning)          the work goes on, but something was changed or looks wrong

Each message says what is wrong, shows the value, and ends with what to do about it.
"""

__all__ = [
    "DataError",
    "DivergenceError",
    "InputError",
    "ModelError",
    "OptionError",
    "ParameterSelectionError",
    "RankError",
    "RunDirectoryError",
    "SolverError",
    "StorageError",
    "VectorError",
    "WhenceError",
    "WhenceWarning",
]


class WhenceError(Exception):
    """Base of every error that whence raises on purpose."""


class InputError(WhenceError, ValueError):
    """Something the caller gave cannot be used."""


class OptionError(InputError):
    """A setting has a value that cannot work."""


class ModelError(InputError):
    """The model cannot be attributed as it stands."""


class ParameterSelectionError(InputError):
    """No parameter is selected."""


class DataError(InputError):
    """An example cannot be used."""


class VectorError(InputError):
    """A vector does not belong to this model, or holds NaN or infinity."""


class RunDirectoryError(InputError):
    """A run directory cannot be used: another configuration, another format, or unfinished."""


class StorageError(WhenceError, RuntimeError):
    """A file could not be written; what was written before is not lost."""


class RankError(WhenceError, RuntimeError):
    """The processes of a run are not all there any more, or do not agree on what they were asked."""


class SolverError(WhenceError, RuntimeError):
    """A solve could not be completed."""


class DivergenceError(SolverError):
    """A stochastic solve diverged and could not be rescued."""


class WhenceWarning(UserWarning):
    """The work goes on, but the user should know."""
