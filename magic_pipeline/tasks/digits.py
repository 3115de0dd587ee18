"""`digits_classifier`: scikit-learn's bundled 1,797 handwritten digits (8 x 8 pixels), an MLP or a small conv net.

The first `train_size` digits in the bundled order are the training data, the rest are the test split; the bundled order
runs writer by writer, so most test digits are in the hands of people whom the model has not seen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.measurements import log_odds
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QueryLine, QuerySource, read_query_lines
from magic_pipeline.tasks.settings import check_choice, check_count

if TYPE_CHECKING:
    import PIL.Image

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU}
DEFAULT_HIDDEN = {"mlp": 64, "conv": 16}
BUNDLED = 1797


@dataclass(frozen=True)
class Digit:
    """One handwritten digit: pixels [8, 8] from 0 (paper) to 1 (ink), float32, and what the writer meant."""

    pixels: Tensor
    label: int


class DigitsClassifier:
    """A classifier of handwritten digits; an example's loss and a query's measurement are its cross entropy.

    Args:
        model: `mlp` (64 - hidden - 10) or `conv` (two 3 x 3 convolutions, average pooling between, a linear layer).
        hidden: hidden units of the MLP (default 64), or channels of the conv net (default 16).
        train_size: how many of the 1,797 digits to train on; the others are the split `test`.
        activation: tanh, gelu, silu or relu. Scores predict retraining best where the model is smooth.
        queries: the split `test` (ids like `test-0007-digit-3`: position in the split, label), or a file of
            `{"id": ..., "index": n}` or `{"id": ..., "indices": [...], "coefficients": [...]}` with positions in it.
    """

    def __init__(
        self,
        model: str = "mlp",
        hidden: int | None = None,
        train_size: int = 1500,
        activation: str = "tanh",
        queries: QuerySource | None = None,
    ) -> None:
        check_choice("model", model, DEFAULT_HIDDEN)
        check_choice("activation", activation, ACTIVATIONS)
        self.model = model
        self.hidden = DEFAULT_HIDDEN[model] if hidden is None else check_count("hidden", hidden)
        self.train_size = check_count("train_size", train_size, at_most=BUNDLED - 1)
        self.activation = activation
        self.query_source = queries
        digits = _bundled_digits()
        self._train, self._test = digits[:train_size], digits[train_size:]

    def build_model(self) -> nn.Module:
        """The network; it takes pixels [rows, 1, 8, 8] and gives logits [rows, 10]."""
        activation, hidden = ACTIVATIONS[self.activation], self.hidden
        if self.model == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), activation(), nn.Linear(hidden, 10))
        return nn.Sequential(
            nn.Conv2d(1, hidden, 3, padding=1),
            activation(),
            nn.AvgPool2d(2),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            activation(),
            nn.Flatten(),
            nn.Linear(hidden * 4 * 4, 10),
        )

    def training_data(self) -> InMemoryDataset:
        """The first `train_size` digits, with ids like `train-0012-digit-7`."""
        return InMemoryDataset(self._train, (_name("train", index, digit) for index, digit in enumerate(self._train)))

    def queries(self) -> Sequence[Query]:
        """Test digits, as the `queries:` section says."""
        source = self.query_source
        if source is None:
            raise InputError("expected a queries: section, for example {split: test, count: 12}", field="queries")
        if source.file is not None:
            return [self._query(line) for line in read_query_lines(source.file)]
        source.check_split("test")
        if source.count is not None and source.count > len(self._test):
            raise InputError(f"the split test has {len(self._test)} digits, not {source.count}", field="queries.count")
        chosen = self._test[: source.count]
        return [Query(_name("test", index, digit), [digit]) for index, digit in enumerate(chosen)]

    def _query(self, line: QueryLine) -> Query:
        if "index" in line.fields:
            line.check_fields(required=frozenset({"index"}))
            return Query(line.id, [self._test_digit(line, line.fields["index"])])
        line.check_fields(required=frozenset({"indices"}), optional=frozenset({"coefficients"}))
        indices, coefficients = (line.fields["indices"], line.fields.get("coefficients", []))
        if not isinstance(indices, list) or not isinstance(coefficients, list):
            raise line.error("expected indices and coefficients to be lists")
        with line.naming():
            return Query(line.id, [self._test_digit(line, index) for index in indices], coefficients)

    def _test_digit(self, line: QueryLine, index: Any) -> Digit:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self._test):
            raise line.error(f"expected a position in the test split, 0 to {len(self._test) - 1}, found {index!r}")
        return self._test[index]

    def collate(self, examples: Sequence[Digit], /) -> dict[str, Tensor]:
        """pixels [rows, 1, 8, 8] float32 and labels [rows] int64."""
        pixels = torch.stack([digit.pixels for digit in examples]).unsqueeze(1)
        return {"pixels": pixels, "labels": torch.tensor([digit.label for digit in examples])}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        """Cross entropy [rows], in the model's dtype."""
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(model(batch["pixels"].to(dtype)), batch["labels"], reduction="none")

    @property
    def measurements(self) -> Mapping[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]]:
        """`log_odds`: the margin of the right class."""
        return {"log_odds": self._log_odds}

    def _log_odds(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        dtype = next(model.parameters()).dtype
        return log_odds(model(batch["pixels"].to(dtype)), batch["labels"])

    def render(self, example: Digit) -> str | PIL.Image.Image:
        """The digit as a 96 x 96 picture, dark ink on white; its label as text where Pillow is not installed."""
        if importlib.util.find_spec("PIL") is None:
            return f"a handwritten {example.label}"
        from PIL import Image

        ink = 255 - (example.pixels * 255).round().to(torch.uint8)
        return Image.fromarray(ink.numpy(), mode="L").resize((96, 96), Image.Resampling.NEAREST)


def _name(split: str, index: int, digit: Digit) -> str:
    return f"{split}-{index:04d}-digit-{digit.label}"


def _bundled_digits() -> list[Digit]:
    datasets = import_extra("sklearn.datasets", extra="digits", needed_by="digits_classifier")
    bundle = datasets.load_digits()
    pixels = torch.tensor(bundle.images / 16.0, dtype=torch.float32)  # 0 to 16 in the bundle: exact in float32
    return [Digit(image, int(label)) for image, label in zip(pixels, bundle.target, strict=True)]
