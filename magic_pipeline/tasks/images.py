"""`image_classifier`: pictures in a folder per class, arrays or datasets, and a model of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.loading import find_object
from magic_pipeline.tasks.measurements import log_odds
from magic_pipeline.tasks.pictures import Picture, read_pictures
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QuerySource
from magic_pipeline.tasks.settings import check_count, check_flag

if TYPE_CHECKING:
    import PIL.Image


class ImageClassifier:
    """A classifier of pictures; an example's loss and a query's measurement are its cross entropy, `log_odds` its margin.

    Args:
        model: `package.module:callable`, which gives the module; it takes [rows, channels, height, width] and gives logits [rows,
            classes] (or an object with `logits`). BatchNorm's running statistics are differentiated like parameters.
        data: a folder with `train/CLASS/*.png` and `test/CLASS/*.png`; or a .npz file with images [n, height, width] or [n, height,
            width, channels] (uint8, or floats from 0 to 1), labels [n], test_images and test_labels; or `package.module:callable`,
            which gives a mapping of such arrays, or of datasets train and test, whose items are (picture, label): a picture is an
            array as above, a tensor [channels, height, width] or a PIL image.
        model_settings, data_settings: keyword arguments of the callables.
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
        data_settings: Mapping[str, Any] | None = None,
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
        found = read_pictures(
            data, dict(data_settings or {}), folder or Path(), size=self.size, grayscale=self.grayscale
        )
        self._train, self._test, self.classes = found.train, found.test, found.classes
        channels = len(self._train[0].pixels)
        for name, values in (("mean", self._mean), ("std", self._std)):
            if len(values) not in (1, channels):
                message = f"expected 1 or {channels} numbers, one for each channel, found {len(values)}"
                raise InputError(message, field=f"task.{name}")

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
        logits = _logits(model, batch)
        if logits.shape != (len(batch["labels"]), logits.shape[-1]) or logits.shape[-1] < len(self.classes):
            message = f"gives {list(logits.shape)} for {len(batch['labels'])} pictures of {len(self.classes)} classes"
            raise InputError(f"{message}; expected logits [pictures, classes]", field="task.model")
        return F.cross_entropy(logits, batch["labels"], reduction="none")

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


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["pixels"].to(next(model.parameters()).dtype))
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits
