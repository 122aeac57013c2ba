"""Images with labels: a folder with one sub-folder per class, or rows with an image and a label."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
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
from whence.sources.records import Records, Row, shown
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
    label_field: str = "label",
    encoding: str = "utf-8",
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
        label_field: of rows: where the label is. The image is in ``image`` or ``img``.
        encoding: of rows in text files.
    """
    if mode not in (None, "RGB", "L"):
        raise OptionError(f"images cannot be converted to {mode!r}; use RGB or L")
    if mode is None and isinstance(transform, (str, Path)) and Path(transform).is_dir():
        mode = "RGB"
    function = _transform(transform)
    root = Path()
    if isinstance(source, Records):
        records = source
    elif split is None and _is_folder_of_classes(Path(source).expanduser()):
        records, labels = _folder(existing_path(source), labels)
        label_field = "label"
    else:
        records = open_records(source, split=split, encoding=encoding)
        place = Path(source).expanduser()
        root = place if place.is_dir() else place.parent
    return Images(records, label_field, labels=labels, transform=function, mode=mode, root=root)


class Images(LabelledRows):
    """Images and their labels as ``(tensor, number)``, read when they are asked for.

    Without a transform, an image is floats from 0 to 1, channels first; all images must then have one size
    and be all grayscale or all RGB, which is checked beforehand from the files' headers. Rows hold an image file's
    bytes or its path below ``root``; the other arguments are those of `open_images`.
    """

    def __init__(
        self,
        records: Records,
        label_field: str,
        *,
        labels: Labels | None,
        transform: Transform | None,
        mode: str | None,
        root: Path,
    ) -> None:
        fields = records[0].fields
        self._field = next((name for name in ("image", "img") if name in fields), "")
        if not self._field:
            raise OptionError(
                f"{records.name} has the fields {', '.join(map(repr, fields))} and no 'image' or 'img'; rename the "
                "one that holds the image"
            )
        super().__init__(records, labels=labels, label_field=label_field)
        self._root, self._transform, self._mode = root, transform, mode
        if transform is None:
            self._check_headers()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = self._checked(index)
        row = self._row(index)
        image = self._open(row)
        if self._mode is not None:
            image = image.convert(self._mode)
        return self._tensor(image, row.where), int(self.targets[index])

    def _tensor(self, image: Any, where: str) -> Tensor:
        if self._transform is None:
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

    def texts(self) -> Iterator[None]:
        return repeat(None, len(self))

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        row = self._row(index)
        image = _thumbnail(self._open(row))
        return Exhibit(id=self.id(index), image=image, label=self.label(index), link=row.link)

    def _open(self, row: Row, *, header_only: bool = False) -> Any:
        """A row's image; with ``header_only``, its pixels are not read."""
        from PIL import Image

        value = row.value(self._field)
        if isinstance(value, Mapping):  # as the datasets library stores images
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if not isinstance(value, (str, Path, bytes)):
            raise DataError(
                f"{row.where}: the field {self._field!r} is {shown(value)}; it must hold an image file's bytes or "
                "its path"
            )
        source = io.BytesIO(value) if isinstance(value, bytes) else self._root / value
        problem = f"{row.where} cannot be read as an image"
        with refusing(DataError, problem, "remove or replace it"), Image.open(source) as image:
            return image if header_only else image.copy()

    def _check_headers(self) -> None:
        first = None
        for row in self._records:
            image = self._open(row, header_only=True)
            if self._mode is None and image.mode not in ("L", "RGB"):
                raise DataError(
                    f"{row.where} has the mode {image.mode}, neither grayscale (L) nor RGB; convert all images with "
                    "mode='RGB' or mode='L', or give a transform"
                )
            kind = f"{image.size[0]} × {image.size[1]} pixels, {self._mode or image.mode}"
            if first is None:
                first, place = kind, row.where
            if kind != first:
                raise DataError(
                    f"the images are of different kinds: {place} is {first}, {row.where} is {kind}; resize them, "
                    "convert all with mode='RGB' or mode='L', or give a transform that does"
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
        raise DataError(
            f"{directory} holds no sub-folders; put the images of each class into one named after it"
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


def _thumbnail(image: Any) -> bytes:
    """The image as a PNG file of at most 128 pixels a side."""
    small = image.copy() if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    return buffer.getvalue()


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
            str(directory), local_files_only=True, trust_remote_code=False, **pillow
        )

    def transform(image: Any) -> Tensor:
        return torch.as_tensor(processor(image, return_tensors="pt")["pixel_values"][0])

    return transform
