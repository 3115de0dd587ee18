"""Pictures from folders and arrays, a model of one's own with BatchNorm, and one clear error for each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.errors import InputError
from magic_pipeline.tasks.loading import load_task
from magic_pipeline.tasks.query_source import QuerySource
from tests.attribution.running import open_small, run

MODEL = "tests.tasks.test_images:small_net"
CLASSES = ("cat", "dog", "owl")


def small_net(channels: int = 3, classes: int = 3) -> nn.Module:
    """Convolution, BatchNorm, a smooth activation, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(3 * 3 * 3, classes),
    )


def no_net() -> str:
    return "no module"


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    drawn = np.random.default_rng(0)
    images = drawn.integers(0, 256, (11, 6, 6, 3), dtype=np.uint8)
    labels = np.arange(11) % 3
    return {"images": images[:9], "labels": labels[:9], "test_images": images[9:], "test_labels": labels[9:]}


def given(dot: float = 0.5, **changes: Any) -> dict[str, Any]:
    """Two pictures to train on and two to ask for, of 2 x 2 pixels, as lists."""
    two = [[[dot, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]]
    content = {"images": two, "labels": [0, 1], "test_images": two, "test_labels": [1, 0]} | changes
    return {name: value for name, value in content.items() if value is not None}


def paired(label: Any = None, rows: int = 9, kind: str = "array") -> dict[str, Any]:
    """The arrays as two datasets of pairs."""
    kinds: dict[str, Callable[[Any], Any]] = {"array": np.asarray, "image": Image.fromarray, "tensor": as_tensor}
    content, as_kind = arrays(), kinds[kind]

    def split(prefix: str, count: int) -> list[tuple[Any, Any]]:
        images, labels = content[f"{prefix}images"][:count], content[f"{prefix}labels"][:count]
        return [(as_kind(image), one if label is None else label) for image, one in zip(images, labels, strict=True)]

    return {"train": split("", rows), "test": split("test_", 2)}


def as_tensor(image: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(image.transpose(2, 0, 1).astype(np.float32) / 255)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The arrays as PNG files in a folder per class."""
    content = arrays()
    for split, prefix in (("train", ""), ("test", "test_")):
        pairs = zip(content[f"{prefix}images"], content[f"{prefix}labels"], strict=True)
        for number, (image, label) in enumerate(pairs):
            folder = tmp_path / "pictures" / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number:02d}.png")
    (tmp_path / "pictures" / "train" / "cat" / "notes.txt").write_text("not a picture")
    return tmp_path / "pictures"


def opened(folder: Path, data: str, **changes: Any) -> OpenExperiment:
    task = {"type": "image_classifier", "model": MODEL, "data": data, "mean": [0.5, 0.5, 0.4], "std": [0.2, 0.2, 0.3]}
    task |= {"model_settings": changes.pop("model_settings", {})}
    return open_small(
        folder,
        task=task,
        queries={"split": "test"},
        training={"batch_size": 3} | changes.pop("training", {}),
        **changes,
    )


def test_a_folder_of_pictures_and_their_arrays_are_the_same_data(tmp_path: Path, pictures: Path) -> None:
    np.savez(tmp_path / "arrays.npz", **arrays())  # type: ignore[arg-type]
    sources = [load(tmp_path, "pictures"), load(tmp_path, "arrays.npz")]
    assert [task.classes for task in sources] == [list(CLASSES), ["0", "1", "2"]]
    by_label = sorted(range(9), key=lambda n: (n % 3, n))
    first, second = sources[0].training_data(), sources[1].training_data()
    assert list(first.ids)[:2] == ["cat/00.png", "cat/03.png"] and list(second.ids)[:2] == ["train-0000", "train-0001"]
    for position, number in enumerate(by_label):
        assert (
            torch.equal(first[position].pixels, second[number].pixels) and first[position].label == second[number].label
        )
    batch = sources[0].collate([first[0]])
    assert batch["pixels"].shape == (1, 3, 6, 6)
    shown = sources[0].render(first[0])
    assert np.array_equal(np.asarray(shown), arrays()["images"][0])


@pytest.mark.parametrize("kind", ["array", "image", "tensor"])
def test_datasets_and_arrays_from_a_callable_are_the_same_data(tmp_path: Path, kind: str) -> None:
    np.savez(tmp_path / "arrays.npz", **arrays())  # type: ignore[arg-type]
    file = load(tmp_path, "arrays.npz")
    pairs = load(tmp_path, "tests.tasks.test_images:paired", data_settings={"kind": kind})
    mapping = load(tmp_path, "tests.tasks.test_images:arrays")
    assert file.training_data().digest == pairs.training_data().digest == mapping.training_data().digest
    assert file.training_data().ids == pairs.training_data().ids and file.classes == pairs.classes == mapping.classes
    assert [query.id for query in pairs.queries()] == ["test-0000", "test-0001"]


def test_a_model_with_too_few_classes_is_named(tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(InputError, match=r"task.model: gives \[3, 2\] for 3 pictures of 3 classes; expected logits"):
        opened(tmp_path, "pictures", model_settings={"classes": 2})


def load(folder: Path, data: str, **settings: Any) -> Any:
    content = {"model": MODEL, "data": data} | settings
    return load_task("image_classifier", content, folder=folder, queries=QuerySource(split="test"))


def test_scores_through_batch_norm_are_central_differences_of_retraining(tmp_path: Path, pictures: Path) -> None:
    found = run(opened(tmp_path, "pictures"))
    # Ordinary retraining with torch's own BatchNorm in float64.
    experiment = opened(tmp_path, "pictures")
    task: Any = experiment.task

    def measured(weights: torch.Tensor) -> torch.Tensor:
        model = task.build_model().double()
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, value in {**experiment.initial_state.params, **experiment.initial_state.buffers}.items():
                tensors[name].copy_(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        slots: dict[str, Any] = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
        model.train()
        for step, indices in enumerate(experiment.order):
            optimizer.zero_grad()
            losses = task.example_losses(model, task.collate([experiment.dataset[index] for index in indices]))
            ((weights[list(indices)] * losses).sum() / len(indices)).backward()
            lr = experiment.recipe.learning_rates[step]
            with torch.no_grad():
                for name, p in model.named_parameters():
                    m, v = slots[name]
                    m.mul_(0.9).add_(p.grad, alpha=0.1)
                    v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    root = (v / (1 - 0.99 ** (step + 1)) + 1e-8).sqrt() + 1e-8
                    p.mul_(1 - lr * 0.01).addcdiv_(m / (1 - 0.9 ** (step + 1)), root, value=-lr)
        model.eval()
        with torch.no_grad():
            return torch.stack(
                [task.example_losses(model, task.collate(q.query.examples))[0] for q in experiment.queries]
            )

    h, largest = 1e-5, float(found.abs().max())
    assert largest > 1e-3
    for example in (0, 4, 8):
        ends = []
        for sign in (1, -1):
            weights = torch.ones(9, dtype=torch.float64)
            weights[example] += sign * h
            ends.append(measured(weights))
        assert float(((ends[0] - ends[1]) / (2 * h) - found[example]).abs().max()) <= 1e-5 * largest


def test_pictures_are_resized_and_made_gray_where_asked(tmp_path: Path, pictures: Path) -> None:
    task = load(tmp_path, "pictures", size=4, grayscale=True)
    assert task.training_data()[0].pixels.shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "nowhere:net"}, "task.model: no module nowhere in"),
        (
            {"model": "tests.tasks.test_images:nothing"},
            "task.model: module tests.tasks.test_images .* has no callable nothing",
        ),
        ({"model": "net"}, "task.model: expected package.module:name, found 'net'"),
        ({"data": "elsewhere"}, "task.data: there is no folder .*elsewhere/train"),
        ({"data": "elsewhere.npz"}, "elsewhere.npz: .*cannot be read"),
        ({"std": [1.0, 0.0, 1.0]}, "task.std: expected numbers above 0"),
        (
            {"grayscale": True, "mean": [0.1, 0.2, 0.3]},
            r"task.mean: expected 1 or 1 numbers, one for each channel, found 3",
        ),
        ({"data_settings": {"of": 3}}, "task.data_settings: is for data from a package.module:callable"),
        ({"data": "tests.tasks.test_images:nothing"}, "task.data: module .* has no callable nothing"),
        (
            {"data": "tests.tasks.test_images:no_net"},
            "task.data: gave a str; expected a mapping with images and labels",
        ),
        (
            {"data": "tests.tasks.test_images:given", "data_settings": {"images": None}},
            "task.data: needs images and labels",
        ),
        (
            {"data": "tests.tasks.test_images:given", "data_settings": {"labels": [0.5, float("nan")]}},
            "do not go with .* of f",
        ),
        (
            {"data": "tests.tasks.test_images:given", "data_settings": {"labels": [0, -1]}},
            r"labels\[1\] is -1; classes start",
        ),
        (
            {"data": "tests.tasks.test_images:given", "data_settings": {"test_labels": [0, 7]}},
            "test-0001 has the class 7, which no",
        ),
        (
            {"data": "tests.tasks.test_images:given", "data_settings": {"dot": float("nan")}},
            "train-0000 has pixels that are not",
        ),
        (
            {"data": "tests.tasks.test_images:paired", "data_settings": {"label": 0.5}},
            "train-0000: expected a label of 0 or .* 0.5",
        ),
        ({"data": "tests.tasks.test_images:paired", "data_settings": {"rows": 0}}, "has no pictures to train on"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, pictures: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, **{"data": "pictures"} | settings)


def test_a_broken_picture_other_sizes_an_unknown_class_and_no_module_are_named(tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(InputError, match="task.model: gave a str, not a torch.nn.Module"):
        load(tmp_path, "pictures", model="tests.tasks.test_images:no_net").build_model()
    other = pictures / "train" / "cat" / "00.png"
    Image.new("RGB", (5, 5)).save(other)
    with pytest.raises(InputError, match=r"task.size: .* is \[3, .*; give a size"):
        load(tmp_path, "pictures")
    other.write_bytes(b"no picture")
    with pytest.raises(InputError, match="cat/00.png: task.data: cannot be read as a picture"):
        load(tmp_path, "pictures")
    other.unlink()
    (pictures / "test" / "fox").mkdir()
    with pytest.raises(InputError, match="the class 'fox' is in test and not in train"):
        load(tmp_path, "pictures")
