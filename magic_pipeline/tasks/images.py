"""`image_classifier`: pictures in a folder per class, or arrays, and a model of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.loading import find_object
from magic_pipeline.tasks.measurements import log_odds
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QuerySource
from magic_pipeline.tasks.settings import check_count, check_flag

if TYPE_CHECKING:
    import PIL.Image

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})


@dataclass(frozen=True)
class Picture:
    """pixels [channels, height, width] float32 from 0 to 1, the number of its class, and its id."""

    pixels: Tensor
    label: int
    id: str


class ImageClassifier:
    """A classifier of pictures; an example's loss and a query's measurement are its cross entropy, `log_odds` its margin.

    Args:
        model: `package.module:callable`, which gives the module; it takes [rows, channels, height, width] and gives logits [rows,
            classes] (or an object with `logits`). BatchNorm's running statistics are differentiated like parameters.
        data: a folder with `train/CLASS/*.png` and `test/CLASS/*.png`, or a .npz file with images [n, height, width] or [n, height,
            width, channels] (uint8, or floats from 0 to 1), labels [n], test_images and test_labels.
        model_settings: keyword arguments of the callable.
        size: pictures are resized to so many pixels a side; null takes them as they are, all of one size.
        grayscale: whether one channel takes the place of three.
        mean, std: subtracted from and divided by, per channel.
        queries: the split `test`.
    """

    def __init__(
        self,
        model: str,
        data: str,
        model_settings: Mapping[str, Any] | None = None,
        size: int | None = None,
        grayscale: bool = False,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        folder: Path | None = None,
        queries: QuerySource | None = None,
    ) -> None:
        self._build = find_object(model, folder or Path(), field="task.model")
        self._settings, self._source = dict(model_settings or {}), queries
        self.size = None if size is None else check_count("size", size)
        self.grayscale = check_flag("grayscale", grayscale)
        self._mean, self._std = (torch.tensor(list(values)).view(-1, 1, 1) for values in (mean, std))
        if bool((self._std <= 0).any()):
            raise InputError(f"expected numbers above 0, found {list(std)}", field="task.std")
        place = (folder or Path()) / data
        self._train, self._test, self.classes = self._arrays(place) if place.suffix == ".npz" else self._folder(place)
        shapes = {tuple(picture.pixels.shape): picture.id for picture in (*self._train, *self._test)}
        if len(shapes) > 1:
            (one, first), (other, second), *_ = shapes.items()
            raise InputError(f"{first} is {list(one)} and {second} {list(other)}; give a size", field="task.size")

    def build_model(self) -> nn.Module:
        """The user's module."""
        found = self._build(**self._settings)
        if not isinstance(found, nn.Module):
            raise InputError(f"gave a {type(found).__name__}, not a torch.nn.Module", field="task.model")
        return found

    def training_data(self) -> InMemoryDataset:
        """The training pictures; ids are their paths below `train`, or `train-0000`."""
        return InMemoryDataset(self._train, [picture.id for picture in self._train])

    def queries(self) -> Sequence[Query]:
        """Test pictures."""
        source = self._source
        if source is None or source.file is not None:
            raise InputError("expected queries: {split: test}, with a count if not all", field="queries")
        source.check_split("test")
        if not self._test or (source.count or 1) > len(self._test):
            message = f"the split test has {len(self._test)} pictures, not {source.count or 'one'}"
            raise InputError(message, field="queries.count")
        return [Query(picture.id, [picture]) for picture in self._test[: source.count]]

    def collate(self, examples: Sequence[Picture], /) -> dict[str, Tensor]:
        """pixels [rows, channels, height, width] float32, normalised, and labels [rows] int64."""
        pixels = (torch.stack([picture.pixels for picture in examples]) - self._mean) / self._std
        return {"pixels": pixels, "labels": torch.tensor([picture.label for picture in examples])}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        """Cross entropy [rows]."""
        return F.cross_entropy(_logits(model, batch), batch["labels"], reduction="none")

    @property
    def measurements(self) -> Mapping[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]]:
        """`log_odds`: the margin of the right class."""
        return {"log_odds": lambda model, batch: log_odds(_logits(model, batch), batch["labels"])}

    def render(self, example: Picture) -> PIL.Image.Image:
        """The picture."""
        image = import_extra("PIL.Image", extra="reports", needed_by="a picture")
        pixels = (example.pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        found: PIL.Image.Image = image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        return found

    def _folder(self, place: Path) -> tuple[list[Picture], list[Picture], list[str]]:
        if not (place / "train").is_dir():
            raise InputError(
                f"there is no folder {place / 'train'}, nor is {place.name} a .npz file", field="task.data"
            )
        classes = sorted(child.name for child in (place / "train").iterdir() if child.is_dir())
        unknown = sorted({c.name for c in (place / "test").glob("*") if c.is_dir()} - set(classes))
        if unknown:
            raise InputError(f"the class {unknown[0]!r} is in test and not in train", field="task.data")
        splits = []
        for split in ("train", "test"):
            files = [
                (file, number)
                for number, name in enumerate(classes)
                for file in sorted((place / split / name).rglob("*"))
                if file.suffix.lower() in _SUFFIXES
            ]
            splits.append([self._read(file, number, place / split) for file, number in files])
        if not splits[0]:
            raise InputError(f"there are no pictures in {place / 'train'}/CLASS/", field="task.data")
        return splits[0], splits[1], classes

    def _read(self, file: Path, label: int, above: Path) -> Picture:
        image = import_extra("PIL.Image", extra="reports", needed_by="a folder of pictures")
        try:
            with image.open(file) as opened:
                found = opened.convert("L" if self.grayscale else "RGB")
        except OSError as error:
            raise InputError(f"cannot be read as a picture: {error}", file=file, field="task.data") from error
        if self.size is not None:
            found = found.resize((self.size, self.size))
        return Picture(_pixels(np.asarray(found)), label, file.relative_to(above).as_posix())

    def _arrays(self, file: Path) -> tuple[list[Picture], list[Picture], list[str]]:
        if self.size is not None or self.grayscale:
            raise InputError(
                "size and grayscale are for folders of pictures; arrays are taken as they are", field="task"
            )
        try:
            with file.open("rb") as stream, np.load(stream) as content:
                arrays = {name: content[name] for name in content.files}
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", file=file, field="task.data") from error
        splits: list[list[Picture]] = []
        for split, prefix in (("train", ""), ("test", "test_")):
            images, labels = arrays.get(f"{prefix}images"), arrays.get(f"{prefix}labels")
            if images is None or labels is None:
                if split == "train":
                    raise InputError(f"needs images and labels, found {', '.join(arrays) or 'nothing'}", file=file)
                splits.append([])
                continue
            if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
                message = f"{prefix}images {list(images.shape)} do not go with {prefix}labels {list(labels.shape)}"
                raise InputError(f"{message} of {labels.dtype}", file=file, field="task.data")
            splits.append(
                [
                    Picture(_pixels(image), int(label), f"{split}-{number:04d}")
                    for number, (image, label) in enumerate(zip(images, labels, strict=True))
                ]
            )
        return splits[0], splits[1], [str(label) for label in range(int(arrays["labels"].max()) + 1)]


def _pixels(image: np.ndarray[Any, Any]) -> Tensor:
    """[channels, height, width] from 0 to 1."""
    scaled = image.astype(np.float32) / (255 if image.dtype.kind in "iu" else 1)
    return torch.from_numpy(scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1)).contiguous()


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["pixels"].to(next(model.parameters()).dtype))
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits
