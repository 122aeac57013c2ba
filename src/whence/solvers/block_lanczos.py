"""Block Lanczos, which conjugate gradients are built on: see `whence.spectrum.lanczos`."""

from whence.spectrum.lanczos import BlockLanczos, as_block, column_dots, finite, rounding_of

__all__ = ["BlockLanczos", "as_block", "column_dots", "finite", "rounding_of"]
