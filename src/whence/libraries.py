"""Optional libraries: imported when needed, with an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from whence.errors import OptionError

__all__ = ["data_frame", "load_library"]


def load_library(module: str, extra: str, purpose: str) -> Any:
    """Import an optional library, or raise `OptionError` with the command that installs it.

    Example:
        >>> load_library("json", "hf", "to read JSON").loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise OptionError(
            f"the library {library} is needed {purpose}, and cannot be imported ({error}); install it with "
            f'pip install "whence[{extra}]"'
        ) from error


def data_frame(content: Any) -> Any:
    """A `pandas.DataFrame` of rows (dicts) or of named columns."""
    return load_library("pandas", "pandas", "to make a data frame").DataFrame(content)
