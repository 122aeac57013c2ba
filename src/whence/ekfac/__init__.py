"""EK-FAC: a preconditioner that knows the network's layers."""

from whence.ekfac.factors import ekfac
from whence.ekfac.preconditioner import Ekfac, KroneckerBlock

__all__ = ["Ekfac", "KroneckerBlock", "ekfac"]
