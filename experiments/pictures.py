"""Pictures from a function and a small convolutional net with BatchNorm: copy both, bring your own data and model."""

from sklearn.datasets import load_digits
from torch import nn


def digits(train_size=1500):
    """Arrays; or return datasets of (picture, label) pairs as {"train": ..., "test": ...}, such as torchvision's."""
    bundle = load_digits()
    images, labels = bundle.images / 16, bundle.target  # ink from 0 to 1
    return {
        "images": images[:train_size],
        "labels": labels[:train_size],
        "test_images": images[train_size:],
        "test_labels": labels[train_size:],
    }


def small_net(width=8):
    """Two convolutions with BatchNorm, whose running statistics are part of what is differentiated."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )
