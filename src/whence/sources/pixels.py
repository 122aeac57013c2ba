"""Images: reading them, turning them into tensors, and showing them small."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import DataError, ModelError, OptionError
from whence.libraries import load_library
from whence.sources.functions import load_function

__all__ = ["image_transform", "open_image", "processor_transform", "thumbnail", "to_tensor"]

#: Pixels of a thumbnail's longer side.
THUMBNAIL = 128

Transform = Callable[[Any], Any]


def open_image(
    source: Path | bytes, where: str, mode: str | None = None, *, header_only: bool = False
) -> Any:
    """A Pillow image, converted to ``mode`` where given; with ``header_only``, its pixels are not read."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            if header_only:
                return opened
            opened.load()
            return opened.copy() if mode is None or mode == opened.mode else opened.convert(mode)
    except FileNotFoundError as error:
        raise DataError(f"{where}: there is no file {str(error.filename)!r}; check the name") from error
    except ValueError as error:
        if mode is None:
            raise _unreadable(where, error) from error
        raise OptionError(
            f"{where}: an image cannot be converted to {mode!r}: {error}; try RGB or L"
        ) from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow reports damage in some formats as a SyntaxError.
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> DataError:
    reason = "it is no image that Pillow knows" if "cannot identify" in str(error) else str(error)
    return DataError(f"{where} cannot be read as an image: {reason}; remove or replace it")


def to_tensor(image: Any, where: str) -> Tensor:
    """A grayscale or RGB image as floats from 0 to 1, channels first."""
    check_mode(image, where)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def check_mode(image: Any, where: str) -> None:
    """Raise `DataError` on images that are neither 8-bit grayscale nor RGB."""
    if image.mode not in ("L", "RGB"):
        raise DataError(
            f"{where} has the mode {image.mode}, neither grayscale (L) nor RGB; convert all images with "
            "mode='RGB' or mode='L', or give a transform"
        )


def thumbnail(image: Any) -> bytes:
    """The image as a PNG file of at most 128 pixels a side."""
    small = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def image_transform(spec: str | Path | Transform | None) -> Transform | None:
    """A transform from the command line: a processor's directory, ``module:function``, or a function itself."""
    if spec is None or callable(spec):
        return spec
    if Path(spec).is_dir():
        return processor_transform(spec)
    if ":" in str(spec):
        return load_function(str(spec), "the transform")
    raise OptionError(
        f"the transform {str(spec)!r} is neither a directory with a preprocessor_config.json nor of the form "
        "module:function"
    )


def processor_transform(directory: str | Path) -> Transform:
    """The Hugging Face image processor in a directory, as a function from a Pillow image to a tensor."""
    if not (Path(directory) / "preprocessor_config.json").is_file():
        raise ModelError(
            f"{directory} has no preprocessor_config.json; give a transform as module:function instead"
        )
    transformers = load_library("transformers", "hf", "to use an image processor")
    # The default processors need torchvision; those written with Pillow do not.
    pillow = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            str(directory), local_files_only=True, **pillow
        )
    except Exception as error:  # a wrong configuration, a class that does not exist, torchvision missing, …
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the image processor in {directory} cannot be loaded: {reason}. If it needs torchvision, install "
            "that, or give a transform as module:function"
        ) from error

    def transform(image: Any) -> Tensor:
        return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])

    return transform
