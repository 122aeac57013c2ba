"""Images with labels, from folders and from rows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tiny_hf import vit_directory
from whence import Classification
from whence.errors import DataError, ModelError, OptionError
from whence.sources import Labels, RowList, load_model, open_images


def picture(seed: int = 0, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def as_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for number, name in enumerate(["dog/2.png", "dog/1.png", "cat/1.png"]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(root / name)
    return root


def test_a_folder_of_classes(folder: Path) -> None:
    data = open_images(folder)
    assert list(data.ids) == ["cat/1.png", "dog/1.png", "dog/2.png"]
    assert data.labels.names == ("cat", "dog")
    image, label = data[2]
    assert label == 1
    assert image.shape == (3, 4, 6)
    expected = torch.from_numpy(np.array(picture(0))).permute(2, 0, 1) / 255
    assert torch.equal(image, expected)
    assert data.find("dog/1.png") == (1,)
    assert data.find("dog") == ()
    assert list(data.texts()) == [None] * 3
    assert Classification().collate([data[i] for i in range(3)]).targets.tolist() == [0, 1, 1]


def test_exhibits_are_small_png_files(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    picture(size=(300, 150)).save(tmp_path / "big" / "a.jpg")
    exhibit = open_images(tmp_path).exhibit(0)
    assert (exhibit.id, exhibit.label, exhibit.link) == ("big/a.jpg", "big", str(tmp_path / "big" / "a.jpg"))
    assert exhibit.image is not None
    with Image.open(io.BytesIO(exhibit.image)) as shown:
        assert (shown.format, shown.size) == ("PNG", (128, 64))


def test_labels_may_come_from_a_file_or_a_model(folder: Path) -> None:
    assert open_images(folder, labels=Labels(("dog", "bird", "cat")))[0][1] == 2
    (folder / "labels.json").write_text(json.dumps(["dog", "cat"]))
    assert open_images(folder)[0][1] == 1
    with pytest.raises(DataError, match=r"pets/cat/1\.png has the label 'cat'; give one of 'dog', 'bird'"):
        open_images(folder, labels=Labels(("dog", "bird")))


# --- rows ----------------------------------------------------------------------------------------------------


def stored_rows() -> list[dict[str, Any]]:
    return [
        {"id": f"row {n}", "image": {"bytes": as_png(picture(n)), "path": None}, "label": n % 2}
        for n in range(3)
    ]


def test_parquet_with_bytes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.Table.from_pylist(stored_rows()).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1)
    data = open_images(tmp_path / "d.parquet")
    assert data.labels.names == ("no", "yes")
    assert (data.id(1), data[1][1], data.exhibit(1).label) == ("row 1", 1, "yes")
    assert torch.equal(data[1][0], torch.from_numpy(np.array(picture(1))).permute(2, 0, 1) / 255)
    assert data.find("row 2") == (2,)


def test_saved_data_sets(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features
    from datasets import Image as ImageFeature

    features = Features({"img": ImageFeature(), "label": ClassLabel(names=["no", "yes"])})
    rows = {"img": [row["image"] for row in stored_rows()], "label": [0, 1, 0]}
    DatasetDict({"train": Dataset.from_dict(rows, features=features)}).save_to_disk(tmp_path / "saved")
    data = open_images(f"{tmp_path / 'saved'}:train")
    assert data.labels.names == ("no", "yes")
    assert data[0][0].shape == (3, 4, 6)
    assert open_images(tmp_path / "saved").id(2) == "saved:train#3"


def test_rows_of_another_encoding(folder: Path) -> None:
    table = folder / "list.csv"
    table.write_bytes("id,image,label\nnaïve,cat/1.png,chaton né\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"--encoding latin-1"):
        open_images(table)
    data = open_images(table, encoding="latin-1")
    assert (data.id(0), data.labels.names) == ("naïve", ("chaton né",))


def test_rows_with_paths(folder: Path) -> None:
    lines = [{"image": "cat/1.png", "label": "cat"}, {"image": "dog/1.png", "label": "dog"}]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = open_images(folder / "list.jsonl")
    assert torch.equal(data[1][0], torch.from_numpy(np.array(picture(1))).permute(2, 0, 1) / 255)
    assert open_images(folder).id(1) == "pets#2"  # a folder of lists: paths are relative to it
    (folder / "list.jsonl").write_text(json.dumps({"image": "cat/9.png", "label": "cat"}))
    with pytest.raises(
        DataError, match=r"list\.jsonl, line 1 cannot be read as an image: .*No such file.*cat/9\.png'"
    ):
        open_images(folder / "list.jsonl")


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        (
            {"image": 3, "label": 0},
            DataError,
            r"d, row 1: the field 'image' is 3 \(int\); it must hold an image file's",
        ),
        (
            {"image": b"no image", "label": 0},
            DataError,
            "d, row 1 cannot be read as an image: cannot identify image file",
        ),
        ({"image": None, "label": 0}, DataError, "d, row 1 leaves the field 'image' empty"),
        ({"image": as_png(picture())}, DataError, "d, row 1 has no field 'label'; it has 'image'"),
        (
            {"picture": b"", "label": 0},
            OptionError,
            "has the fields 'picture', 'label' and no 'image' or 'img'",
        ),
    ],
)
def test_rows_that_hold_no_image(row: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        open_images(RowList([row], name="d"))


def test_labels_out_of_range() -> None:
    rows = RowList([{"image": as_png(picture()), "label": 2}], name="d")
    with pytest.raises(
        DataError, match="d, row 1 has the label 2; give one of 'a', 'b', or a number from 0 to 1"
    ):
        open_images(rows, labels=Labels(("a", "b")))


# --- sizes and modes -----------------------------------------------------------------------------------------


def test_mixed_sizes_are_refused_naming_two_files(folder: Path) -> None:
    picture(size=(8, 4)).save(folder / "dog" / "3.png")
    with pytest.raises(
        DataError, match=r"cat/1\.png is 6 × 4 pixels, .*dog/3\.png is 8 × 4 pixels.*; resize them"
    ):
        open_images(folder)
    assert open_images(folder, transform=lambda image: torch.zeros(image.size))[3][0].shape == (8, 4)


def test_mixed_modes_are_refused_or_converted(folder: Path) -> None:
    picture(mode="L").save(folder / "dog" / "3.png")
    with pytest.raises(
        DataError,
        match=r"cat/1\.png is 6 × 4 pixels, RGB, .*dog/3\.png is .*, L; .*convert all with mode='RGB'",
    ):
        open_images(folder)
    assert open_images(folder, mode="RGB")[3][0].shape == (3, 4, 6)
    assert open_images(folder, mode="L")[0][0].shape == (1, 4, 6)
    with pytest.raises(OptionError, match="cannot be converted to 'XYZ'"):
        open_images(folder, mode="XYZ")


@pytest.mark.parametrize("mode", ["P", "RGBA", "1", "I;16"])
def test_other_modes_need_a_conversion(mode: str, folder: Path) -> None:
    image = picture(mode="L").convert("I;16") if mode == "I;16" else picture(mode=mode)
    image.save(folder / "cat" / "1.png")
    with pytest.raises(
        DataError, match=rf"cat/1\.png has the mode {mode}, neither grayscale \(L\) nor RGB; convert"
    ):
        open_images(folder)
    assert open_images(folder, mode="RGB").exhibit(0).image


# --- transforms ----------------------------------------------------------------------------------------------


def test_transforms_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef shrink(image):\n    return torch.ones(3) * image.size[0]\n"
    )
    assert open_images(folder, transform=f"{tmp_path / 'mine.py'}:shrink")[0][0].tolist() == [6, 6, 6]


def test_image_processors(folder: Path, tmp_path: Path) -> None:
    picture(size=(9, 20), mode="L").save(folder / "cat" / "1.png")
    problem = load_model(vit_directory(tmp_path / "vit"))
    data = open_images(folder, transform=problem.directory)
    images = torch.stack([data[i][0] for i in range(3)])
    assert images.shape == (3, 3, 8, 8)
    assert problem.model(images).logits.shape == (3, 2)


@pytest.mark.parametrize(
    ("transform", "error", "match"),
    [
        (
            "nowhere",
            OptionError,
            "the transform 'nowhere' is neither a directory with a preprocessor_config.json",
        ),
        ("math:nothing", OptionError, "math has no function 'nothing'; it has"),
        ("no.such.module:f", OptionError, "there is no module 'no.such.module'"),
        (
            lambda image: 1 / 0,
            DataError,
            r"1\.png: the transform failed on an image of mode RGB .*division by zero",
        ),
        (lambda image: [1], DataError, r"1\.png: the transform returned a list; it must return a tensor"),
    ],
)
def test_transforms_that_fail(transform: Any, error: Any, match: str, folder: Path) -> None:
    with pytest.raises(error, match=match):
        open_images(folder, transform=transform)[0]


def test_processors_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"has no preprocessor_config\.json; give a transform as module:function"
    ):
        open_images(folder, transform=tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "NoSuchProcessor"})
    )
    with pytest.raises(
        ModelError, match=r"cannot be loaded: .*torchvision, install that, or give a transform"
    ):
        open_images(folder, transform=tmp_path)


# --- bad input -----------------------------------------------------------------------------------------------


def test_folders_that_hold_no_classes(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    with pytest.raises(DataError, match="holds no sub-folders; put the images of each class into one"):
        open_images(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match=r"the class folder .*cat holds no PNG or JPEG image; remove it"):
        open_images(tmp_path)
    with pytest.raises(DataError, match=r"there is no file or directory '.*nowhere'"):
        open_images(tmp_path / "nowhere")


def test_images_that_cannot_be_read_are_named(folder: Path) -> None:
    whole = (folder / "cat" / "1.png").read_bytes()
    (folder / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cat/1\.png cannot be read as an image: .*; remove or replace it"):
        open_images(folder)[0]
    (folder / "cat" / "1.png").write_bytes(b"GIF")
    with pytest.raises(DataError, match=r"cat/1\.png cannot be read as an image: cannot identify image file"):
        open_images(folder)
