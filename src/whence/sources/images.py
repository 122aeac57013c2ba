"""Images with labels: a folder with one sub-folder per class, or rows with an image and a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.errors import DataError, OptionError
from whence.exhibit import Exhibit
from whence.sources.examples import Examples
from whence.sources.labels import Labels, labels_for
from whence.sources.open_records import IMAGE_SUFFIXES, existing_path, is_saved_dataset, open_records
from whence.sources.pixels import Transform, check_mode, image_transform, open_image, thumbnail, to_tensor
from whence.sources.records import RecordIds, Records, field_of

__all__ = ["ImageExamples", "image_folder", "image_records", "open_images"]


class ImageExamples(Examples):
    """Images and their labels as ``(tensor, number)``, read when they are asked for.

    Without a transform, an image is floats from 0 to 1, channels first; all images must then have one size
    and be all grayscale or all RGB, which is checked beforehand from the files' headers.

    Args:
        name: what to call the data set.
        source: how many images there are, and where.
        targets: their classes.
        labels: the classes' names.
        transform: from a Pillow image to a tensor.
        mode: what every image is converted to first: ``RGB`` or ``L``.
    """

    def __init__(
        self,
        name: str,
        source: ImageSource,
        targets: Sequence[int],
        labels: Labels,
        *,
        transform: Transform | None = None,
        mode: str | None = None,
    ) -> None:
        self.name, self.labels = name, labels
        self._source, self._transform, self._mode = source, transform, mode
        self._targets = torch.as_tensor(targets)
        if transform is None:
            self._check_headers()

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index = self._checked(index)
        where = self._source.where(index)
        image = open_image(self._source.read(index), where, self._mode)
        if self._transform is None:
            return to_tensor(image, where), int(self._targets[index])
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
        return result, int(self._targets[index])

    def id(self, index: int) -> str:
        return self._source.id(self._checked(index))

    def find(self, id: str) -> tuple[int, ...]:
        position = self._source.find(id)
        return () if position is None else (position,)

    def text(self, index: int) -> None:
        return None

    def exhibit(self, index: int) -> Exhibit:
        index = self._checked(index)
        image = open_image(self._source.read(index), self._source.where(index))
        return Exhibit(
            id=self.id(index),
            image=thumbnail(image),
            label=self.labels.names[int(self._targets[index])],
            link=self._source.link(index),
        )

    def _check_headers(self) -> None:
        first: Any = None
        for index in range(len(self)):
            where = self._source.where(index)
            image = open_image(self._source.read(index), where, header_only=True)
            if self._mode is None:
                check_mode(image, where)
            first = image if first is None else first
            if image.size != first.size:
                raise DataError(
                    f"the images have different sizes: {self._source.where(0)} is {_size_of(first)}, {where} is "
                    f"{_size_of(image)}; resize them, or give a transform that does"
                )
            if self._mode is None and image.mode != first.mode:
                raise DataError(
                    f"grayscale and RGB images are mixed: {self._source.where(0)} is {first.mode}, {where} is "
                    f"{image.mode}; convert all with mode='RGB' or mode='L'"
                )


class ImageSource:
    """Where images are: files, or rows of records."""

    def read(self, index: int) -> Path | bytes:
        """The image's file or its bytes."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Where it is, for messages."""
        raise NotImplementedError

    def link(self, index: int) -> str | None:
        """Where a reader can find it."""
        raise NotImplementedError

    def id(self, index: int) -> str:
        """Its name."""
        raise NotImplementedError

    def find(self, id: str) -> int | None:
        """The position of a name."""
        raise NotImplementedError


class _Files(ImageSource):
    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self._root, self._files = root, files
        self._positions = {self.id(index): index for index in range(len(files))}

    def read(self, index: int) -> Path:
        return self._files[index]

    def where(self, index: int) -> str:
        return str(self._files[index])

    link = where

    def id(self, index: int) -> str:
        return self._files[index].relative_to(self._root).as_posix()

    def find(self, id: str) -> int | None:
        return self._positions.get(id)


class _Rows(ImageSource):
    def __init__(self, records: Records, ids: RecordIds, field: str, root: Path | None) -> None:
        self._records, self._ids, self._field, self._root = records, ids, field, root

    def read(self, index: int) -> Path | bytes:
        value = field_of(self._records, index, self._records[index], self._field)
        if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path"):
            value = value["path"]
        if isinstance(value, Mapping):  # as the datasets library stores images
            value = value.get("bytes")
        if isinstance(value, str):
            return (self._root or Path()) / value
        if not isinstance(value, bytes):
            raise DataError(
                f"{self.where(index)}: the field {self._field!r} is a {type(value).__name__}; it must hold an image "
                "file's bytes or its path"
            )
        return value

    def where(self, index: int) -> str:
        return self._records.where(index)

    def link(self, index: int) -> str | None:
        return self._records.link(index)

    def id(self, index: int) -> str:
        return self._ids[index]

    def find(self, id: str) -> int | None:
        return self._ids.find(id)


def open_images(
    path: str | Path,
    *,
    transform: str | Path | Transform | None = None,
    mode: str | None = None,
    labels: Labels | None = None,
    split: str | None = None,
    image_field: str | None = None,
    label_field: str = "label",
) -> ImageExamples:
    """Images by what ``path`` is: a folder with class sub-folders, or anything that `open_records` reads.

    Args:
        path: of the folder, file or saved data set (``path:split``).
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
    transform = image_transform(transform)
    if split is None and Path(path).expanduser().is_dir():
        directory = existing_path(path)
        has_rows = any(directory.glob("*.parquet")) or any(directory.glob("*.jsonl"))
        if not is_saved_dataset(directory) and not has_rows:
            return image_folder(directory, transform=transform, mode=mode, labels=labels)
    records = open_records(path, split=split)
    root = Path(str(path)).expanduser().parent
    return image_records(
        records,
        transform=transform,
        mode=mode,
        labels=labels,
        image_field=image_field,
        label_field=label_field,
        root=root,
    )


def image_folder(
    directory: Path,
    *,
    transform: Transform | None = None,
    mode: str | None = None,
    labels: Labels | None = None,
) -> ImageExamples:
    """A folder with one sub-folder of PNG or JPEG files per class; ids are the paths below it."""
    if labels is None and (directory / "labels.json").is_file():
        labels = Labels.from_file(directory / "labels.json")
    classes = sorted(p for p in directory.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        loose = any(p.suffix.lower() in IMAGE_SUFFIXES for p in directory.iterdir())
        problem = "holds images but no sub-folders" if loose else "holds no sub-folders with images"
        raise DataError(
            f"{directory} {problem}; put the images of each class into a sub-folder named after it"
        )
    names = Labels(tuple(p.name for p in classes)) if labels is None else labels
    files, targets = [], []
    for folder in classes:
        found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"the class folder {folder} holds no PNG or JPEG image; remove it, or add images")
        files += found
        targets += [names.number(folder.name, str(folder))] * len(found)
    return ImageExamples(
        directory.name, _Files(directory, files), targets, names, transform=transform, mode=mode
    )


def image_records(
    records: Records,
    *,
    transform: Transform | None = None,
    mode: str | None = None,
    labels: Labels | None = None,
    image_field: str | None = None,
    label_field: str = "label",
    root: Path | None = None,
) -> ImageExamples:
    """Rows with an image file's bytes (as the ``datasets`` library stores them) or its path, and a label."""
    first = records[0]
    if image_field is None:
        image_field = next((name for name in ("image", "img") if name in first), None)
        if image_field is None:
            raise OptionError(
                f"{records.name} has the fields {', '.join(map(repr, first))} and no 'image' or 'img'; say which "
                "holds the image"
            )
    ids = RecordIds(records)
    values = []
    for row, fields in enumerate(records):
        ids.add(row, fields)
        values.append(field_of(records, row, fields, label_field))
    known = labels_for(values, labels, records.class_names(label_field))
    targets = [known.number(value, records.where(row)) for row, value in enumerate(values)]
    source = _Rows(records, ids, image_field, root)
    return ImageExamples(records.name, source, targets, known, transform=transform, mode=mode)


def _size_of(image: Any) -> str:
    return f"{image.size[0]} × {image.size[1]} pixels"
