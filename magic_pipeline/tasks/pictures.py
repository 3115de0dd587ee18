"""Pictures and their classes, read from folders, arrays and datasets; each mistake is one error that names the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.loading import find_object

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
_SPLITS: tuple[tuple[Literal["train", "test"], str], ...] = (("train", ""), ("test", "test_"))


@dataclass(frozen=True)
class Picture:
    """pixels [channels, height, width] float32 from 0 to 1, the number of its class, and its id."""

    pixels: Tensor
    label: int
    id: str


@dataclass(frozen=True)
class Pictures:
    """Two splits and the names of the classes."""

    train: list[Picture]
    test: list[Picture]
    classes: list[str]


def read_pictures(
    data: str, settings: Mapping[str, Any], folder: Path, *, size: int | None, grayscale: bool
) -> Pictures:
    """What `data` names: a folder, a .npz file or a `package.module:callable`, as `ImageClassifier` describes them.

    Raises:
        InputError: something cannot be read, has no class or another size; names file or picture.
    """
    place = folder / data
    from_callable = ":" in data and not place.exists()
    if settings and not from_callable:
        raise InputError("is for data from a package.module:callable", field="task.data_settings")
    if from_callable or place.suffix == ".npz":
        if size is not None or grayscale:
            raise InputError(
                "size and grayscale are for folders of pictures; arrays and datasets are taken as they are",
                field="task",
            )
        found = _given(find_object(data, folder, field="task.data")(**settings)) if from_callable else _arrays(place)
    else:
        found = _of_folder(place, size, grayscale)
    if not found.train:
        raise InputError(f"{data} has no pictures to train on", field="task.data")
    unknown = next((picture for picture in found.test if picture.label >= len(found.classes)), None)
    if unknown is not None:
        message = f"{unknown.id} has the class {unknown.label}, which no picture to train on has"
        raise InputError(message, field="task.data")
    shapes = {tuple(picture.pixels.shape): picture.id for picture in (*found.train, *found.test)}
    if len(shapes) > 1:
        (one, first), (other, second), *_ = shapes.items()
        raise InputError(f"{first} is {list(one)} and {second} {list(other)}; give a size", field="task.size")
    return found


def _of_folder(place: Path, size: int | None, grayscale: bool) -> Pictures:
    if not (place / "train").is_dir():
        raise InputError(f"there is no folder {place / 'train'}, nor is {place.name} a .npz file", field="task.data")
    classes = sorted(child.name for child in (place / "train").iterdir() if child.is_dir())
    unknown = sorted({c.name for c in (place / "test").glob("*") if c.is_dir()} - set(classes))
    if unknown:
        raise InputError(f"the class {unknown[0]!r} is in test and not in train", field="task.data")
    splits = {
        split: [
            Picture(_of_file(file, size, grayscale), label, file.relative_to(place / split).as_posix())
            for label, name in enumerate(classes)
            for file in sorted((place / split / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        for split in ("train", "test")
    }
    if not splits["train"]:
        raise InputError(f"there are no pictures in {place / 'train'}/CLASS/", field="task.data")
    return Pictures(splits["train"], splits["test"], classes)


def _of_file(file: Path, size: int | None, grayscale: bool) -> Tensor:
    image = import_extra("PIL.Image", extra="reports", needed_by="a folder of pictures")
    try:
        with image.open(file) as opened:
            found = opened.convert("L" if grayscale else "RGB")
    except OSError as error:
        raise InputError(f"cannot be read as a picture: {error}", file=file, field="task.data") from error
    return _pixels(np.asarray(found if size is None else found.resize((size, size))), file.name)


def _arrays(file: Path) -> Pictures:
    try:
        with file.open("rb") as stream, np.load(stream) as content:
            arrays = {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot be read: {error}", file=file, field="task.data") from error
    return _of_arrays(arrays, file)


def _given(content: Any) -> Pictures:
    """From the mapping that a callable gave: of arrays, or of two datasets."""
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise InputError(f"gave a {kind}; expected a mapping with images and labels, or with train", field="task.data")
    if "train" not in content:
        return _of_arrays({name: np.asarray(array) for name, array in content.items()}, None)
    train, test = (
        [_item(dataset[number], f"{split}-{number:04d}") for number in range(len(dataset))]
        for split in ("train", "test")
        for dataset in (content.get(split, ()),)
    )
    return Pictures(train, test, _numbered([picture.label for picture in train]))


def _item(item: Any, name: str) -> Picture:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"{name}: expected a pair (picture, label), found a {type(item).__name__}", field="task.data")
    picture, label = item
    if isinstance(label, Tensor | np.ndarray | np.generic):
        label = label.item() if np.ndim(label) == 0 else label
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise InputError(f"{name}: expected a label of 0 or a whole number above, found {label!r}", field="task.data")
    array = picture.numpy().transpose(1, 2, 0) if isinstance(picture, Tensor) else np.asarray(picture)
    return Picture(_pixels(array, name), label, name)


def _of_arrays(arrays: Mapping[str, np.ndarray[Any, Any]], file: Path | None) -> Pictures:
    splits: dict[str, list[Picture]] = {}
    for split, prefix in _SPLITS:
        images, labels = arrays.get(f"{prefix}images"), arrays.get(f"{prefix}labels")
        if images is None or labels is None:
            if split == "train":
                known = ", ".join(arrays) or "nothing"
                raise InputError(f"needs images and labels, found {known}", file=file, field="task.data")
            splits[split] = []
            continue
        if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            message = f"{prefix}images {list(images.shape)} do not go with {prefix}labels {list(labels.shape)}"
            raise InputError(f"{message} of {labels.dtype}", file=file, field="task.data")
        if len(labels) and labels.min() < 0:
            at = int(labels.argmin())
            raise InputError(f"{prefix}labels[{at}] is {labels[at]}; classes start at 0", file=file, field="task.data")
        splits[split] = [
            Picture(_pixels(image, f"{split}-{number:04d}", file), int(label), f"{split}-{number:04d}")
            for number, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
    return Pictures(splits["train"], splits["test"], _numbered([picture.label for picture in splits["train"]]))


def _numbered(labels: list[int]) -> list[str]:
    return [str(label) for label in range(max(labels, default=-1) + 1)]


def _pixels(image: np.ndarray[Any, Any], name: str, file: Path | None = None) -> Tensor:
    """[channels, height, width] from 0 to 1."""
    if image.ndim not in (2, 3) or image.dtype.kind not in "iuf":
        raise InputError(f"{name} is {list(image.shape)} of {image.dtype}, no picture", file=file, field="task.data")
    if not np.isfinite(image).all():
        raise InputError(f"{name} has pixels that are not finite", file=file, field="task.data")
    scaled = image.astype(np.float32) / (255 if image.dtype.kind in "iu" else 1)
    return torch.from_numpy(scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1)).contiguous()
