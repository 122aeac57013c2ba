"""Images with labels: a folder with one sub-folder per class, or rows with an image and a label."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.errors import DataError, ModelError, OptionError
from whence.exhibit import Exhibit
from whence.libraries import load_library
from whence.sources.examples import LabelledRows
from whence.sources.files import existing_path, refusing
from whence.sources.formats import IMAGE_SUFFIXES, Files, open_records
from whence.sources.functions import load_function
from whence.sources.labels import Labels
from whence.sources.records import Records, Row
from whence.sources.tables import is_saved_dataset

__all__ = ["Images", "open_images"]

#: Pixels of a thumbnail's longer side.
THUMBNAIL = 128

#: From a Pillow image to a tensor.
Transform = Callable[[Any], Any]


def open_images(
    source: str | Path | Records,
    *,
    transform: str | Path | Transform | None = None,
    mode: str | None = None,
    labels: Labels | None = None,
    split: str | None = None,
    image_field: str | None = None,
    label_field: str = "label",
) -> Images:
    """Images by what ``source`` is: a folder with class sub-folders, records, or a path that `open_records` reads.

    Args:
        source: the path of the folder, file or saved data set (``path:split``), or records.
        transform: a function from a Pillow image to a tensor, ``module:function``, or a directory with a
            Hugging Face image processor, which also sets ``mode`` to RGB unless it is given.
        mode: ``RGB`` or ``L``: what every image is converted to first.
        labels: the classes in the order of the model's outputs; by default the folders' names in order, what
            the format stores, or the sorted labels in the data. A ``labels.json`` in the folder is read.
        split: of a saved ``DatasetDict``.
        image_field: of rows: where the image is; ``image`` or ``img`` by default.
        label_field: of rows: where the label is.
    """
    if mode is None and isinstance(transform, (str, Path)) and Path(transform).is_dir():
        mode = "RGB"
    function = _transform(transform)
    root = Path()
    if isinstance(source, Records):
        records = source
    elif split is None and _is_folder_of_classes(Path(source).expanduser()):
        records, labels = _folder(existing_path(source), labels)
        image_field, label_field = "image", "label"
    else:
        records = open_records(source, split=split)
        place = Path(source).expanduser()
        root = place if place.is_dir() else place.parent
    field = _image_field(records) if image_field is None else image_field
    return Images(records, field, label_field, labels=labels, transform=function, mode=mode, root=root)


class Images(LabelledRows):
    """Images and their labels as ``(tensor, number)``, read when they are asked for.

    Without a transform, an image is floats from 0 to 1, channels first; all images must then have one size
    and be all grayscale or all RGB, which is checked beforehand from the files' headers.

    Args:
        records: rows with an image file's bytes (as the ``datasets`` library stores them) or its path.
        image_field, label_field: where the image and the label are.
        labels: the classes; by default those that the data name.
        transform: from a Pillow image to a tensor.
        mode: what every image is converted to first: ``RGB`` or ``L``.
        root: what the images' paths are relative to.
    """

    def __init__(
        self,
        records: Records,
        image_field: str,
        label_field: str,
        *,
        labels: Labels | None = None,
        transform: Transform | None = None,
        mode: str | None = None,
        root: Path,
    ) -> None:
        super().__init__(records, labels=labels, label_field=label_field)
        self._field, self._root = image_field, root
        self._transform, self._mode = transform, mode
        if transform is None:
            self._check_headers()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = self._checked(index)
        row = self._records[index]
        image = self._open(row, self._mode)
        return self._tensor(image, row.where), int(self.targets[index])

    def _tensor(self, image: Any, where: str) -> Tensor:
        if self._transform is None:
            _check_mode(image, where)
            pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
            return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
        try:
            result = self._transform(image)
        except Exception as error:
            raise DataError(
                f"{where}: the transform failed on an image of mode {image.mode} and size {image.size}: {error}; "
                "convert all images first (mode='RGB'), or repair the transform"
            ) from error
        if not isinstance(result, Tensor):
            raise DataError(
                f"{where}: the transform returned a {type(result).__name__}; it must return a tensor"
            )
        return result

    def text(self, index: int) -> None:
        return None

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        row = self._records[index]
        image = _thumbnail(self._open(row))
        return Exhibit(id=self.id(index), image=image, label=self.label(index), link=row.link)

    def _open(self, row: Row, mode: str | None = None, *, header_only: bool = False) -> Any:
        """A row's image, converted to ``mode`` where given; with ``header_only``, its pixels are not read."""
        value = row.value(self._field)
        if isinstance(value, Mapping):  # as the datasets library stores images
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, (str, Path)):
            return _read_image(self._root / value, row.where, mode, header_only)
        if isinstance(value, bytes):
            return _read_image(io.BytesIO(value), row.where, mode, header_only)
        raise DataError(
            f"{row.where}: the field {self._field!r} is a {type(value).__name__}; it must hold an image "
            "file's bytes or its path"
        )

    def _check_headers(self) -> None:
        first: Any = None
        for row in self._records:
            image = self._open(row, header_only=True)
            if self._mode is None:
                _check_mode(image, row.where)
            if first is None:
                first, place = image, row.where
            if image.size != first.size:
                raise DataError(
                    f"the images have different sizes: {place} is {_size_of(first)}, {row.where} is "
                    f"{_size_of(image)}; resize them, or give a transform that does"
                )
            if self._mode is None and image.mode != first.mode:
                raise DataError(
                    f"grayscale and RGB images are mixed: {place} is {first.mode}, {row.where} is "
                    f"{image.mode}; convert all with mode='RGB' or mode='L'"
                )


def _is_folder_of_classes(path: Path) -> bool:
    has_rows = any(path.glob("*.parquet")) or any(path.glob("*.jsonl"))
    return path.is_dir() and not is_saved_dataset(path) and not has_rows


def _folder(directory: Path, labels: Labels | None) -> tuple[Records, Labels]:
    """A folder with one sub-folder of PNG or JPEG files per class; ids are the paths below it."""
    if labels is None and (directory / "labels.json").is_file():
        labels = Labels.from_file(directory / "labels.json")
    folders = sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        loose = any(p.suffix.lower() in IMAGE_SUFFIXES for p in directory.iterdir())
        problem = "holds images but no sub-folders" if loose else "holds no sub-folders with images"
        raise DataError(
            f"{directory} {problem}; put the images of each class into a sub-folder named after it"
        )
    files: list[Path] = []
    for folder in folders:
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"the class folder {folder} holds no PNG or JPEG image; remove it, or add images")
        files += found
    return _ImageFiles(directory, files), labels or Labels(tuple(folder.name for folder in folders))


class _ImageFiles(Files):
    def _content(self, path: Path, id: str) -> Mapping[str, Any]:
        return {"image": path, "label": id.partition("/")[0]}


def _image_field(records: Records) -> str:
    fields = records[0].fields
    for name in ("image", "img"):
        if name in fields:
            return name
    raise OptionError(
        f"{records.name} has the fields {', '.join(map(repr, fields))} and no 'image' or 'img'; say which "
        "holds the image"
    )


# --- pixels ----------------------------------------------------------------------------------------------


def _read_image(source: Path | io.BytesIO, where: str, mode: str | None, header_only: bool) -> Any:
    from PIL import Image

    try:
        with Image.open(source) as opened:
            if header_only:
                return opened
            opened.load()
            return opened.copy() if mode is None or mode == opened.mode else opened.convert(mode)
    except FileNotFoundError as error:
        raise DataError(f"{where}: there is no file {str(error.filename)!r}; check the name") from error
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, ValueError) and mode is not None:
            raise OptionError(
                f"{where}: an image cannot be converted to {mode!r}: {error}; try RGB or L"
            ) from error
        # Pillow reports damage in some formats as a SyntaxError.
        reason = "it is no image that Pillow knows" if "cannot identify" in str(error) else str(error)
        raise DataError(f"{where} cannot be read as an image: {reason}; remove or replace it") from error


def _check_mode(image: Any, where: str) -> None:
    """Raise `DataError` on images that are neither 8-bit grayscale nor RGB."""
    if image.mode not in ("L", "RGB"):
        raise DataError(
            f"{where} has the mode {image.mode}, neither grayscale (L) nor RGB; convert all images with "
            "mode='RGB' or mode='L', or give a transform"
        )


def _size_of(image: Any) -> str:
    return f"{image.size[0]} × {image.size[1]} pixels"


def _thumbnail(image: Any) -> bytes:
    """The image as a PNG file of at most 128 pixels a side."""
    small = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


# --- transforms ------------------------------------------------------------------------------------------


def _transform(spec: str | Path | Transform | None) -> Transform | None:
    """A transform from the command line: a processor's directory, ``module:function``, or a function itself."""
    if spec is None or callable(spec):
        return spec
    if Path(spec).is_dir():
        return _processor(Path(spec))
    if ":" in str(spec):
        return load_function(str(spec), "the transform")
    raise OptionError(
        f"the transform {str(spec)!r} is neither a directory with a preprocessor_config.json nor of the form "
        "module:function"
    )


def _processor(directory: Path) -> Transform:
    """The Hugging Face image processor in a directory, as a function from a Pillow image to a tensor."""
    if not (directory / "preprocessor_config.json").is_file():
        raise ModelError(
            f"{directory} has no preprocessor_config.json; give a transform as module:function instead"
        )
    transformers = load_library("transformers", "hf", "to use an image processor")
    # The default processors need torchvision; those written with Pillow do not.
    pillow = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    remedy = "if it needs torchvision, install that, or give a transform as module:function"
    with refusing(ModelError, f"the image processor in {directory} cannot be loaded", remedy):
        processor = transformers.AutoImageProcessor.from_pretrained(
            str(directory), local_files_only=True, **pillow
        )

    def transform(image: Any) -> Tensor:
        return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])

    return transform
