"""EK-FAC: a preconditioner that knows the network's layers."""

from whence.preconditioners.ekfac.factors import ekfac
from whence.preconditioners.ekfac.preconditioner import Ekfac, KroneckerBlock

__all__ = ["Ekfac", "KroneckerBlock", "ekfac"]
