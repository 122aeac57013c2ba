"""What is measured of an operator's spectrum, each number with its error. See `estimate_spectrum`."""

from whence.spectrum.estimate import Estimate
from whence.spectrum.lanczos import LanczosResult, lanczos
from whence.spectrum.moments import (
    frobenius_from_products,
    sampling_constant,
    trace_and_frobenius_from_gradients,
    trace_from_quadratic_forms,
)
from whence.spectrum.sketch import SketchResult, sketch
from whence.spectrum.summary import Spectrum, estimate_spectrum

__all__ = [
    "Estimate",
    "LanczosResult",
    "SketchResult",
    "Spectrum",
    "estimate_spectrum",
    "frobenius_from_products",
    "lanczos",
    "sampling_constant",
    "sketch",
    "trace_and_frobenius_from_gradients",
    "trace_from_quadratic_forms",
]
