"""What is measured of an operator's spectrum, each number with its error. See `estimate_spectrum`."""

from whence.spectrum.density import Density, spectral_density
from whence.spectrum.estimate import Estimate
from whence.spectrum.lambda_max import LanczosResult, SketchResult, lanczos, sketch
from whence.spectrum.moments import (
    frobenius_from_products,
    sampling_constant,
    trace_and_frobenius_from_gradients,
    trace_from_quadratic_forms,
)
from whence.spectrum.summary import Spectrum, estimate_spectrum

__all__ = [
    "Density",
    "Estimate",
    "LanczosResult",
    "SketchResult",
    "Spectrum",
    "estimate_spectrum",
    "frobenius_from_products",
    "lanczos",
    "sampling_constant",
    "sketch",
    "spectral_density",
    "trace_and_frobenius_from_gradients",
    "trace_from_quadratic_forms",
]
