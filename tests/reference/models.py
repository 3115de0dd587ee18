"""Small models in float64, one a kind of difficulty. Each builder seeds itself and restores the ambient generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def mlp(features: int = 5, hidden: int = 7, classes: int = 3, dropout: float = 0.0) -> nn.Module:
    """Linear-Tanh-Linear; with dropout between."""
    middle: list[nn.Module] = [nn.Tanh()] + ([nn.Dropout(dropout)] if dropout else [])
    return seeded(1, lambda: nn.Sequential(nn.Linear(features, hidden), *middle, nn.Linear(hidden, classes)))


class ConvNet(nn.Module):
    """Convolution, BatchNorm2d, linear, BatchNorm1d, linear; both norms follow a bias that they make useless."""

    def __init__(self, momentum: float | None, affine: bool, tracked: bool) -> None:
        super().__init__()
        settings: dict[str, Any] = {"momentum": momentum, "affine": affine, "track_running_stats": tracked}
        self.convolution = nn.Conv2d(1, 3, 3, stride=2)
        self.over_pixels = nn.BatchNorm2d(3, **settings)
        self.head = nn.Linear(12, 6)
        self.over_features = nn.BatchNorm1d(6, **settings)
        self.out = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        pixels = torch.tanh(self.over_pixels(self.convolution(images)))
        scores: Tensor = self.out(torch.tanh(self.over_features(self.head(pixels.flatten(1)))))
        return scores


def conv_net(momentum: float | None = 0.3, affine: bool = True, tracked: bool = True) -> nn.Module:
    return seeded(2, lambda: ConvNet(momentum=momentum, affine=affine, tracked=tracked))


def gpt2(
    *,
    layers: int = 1,
    width: int = 16,
    heads: int = 2,
    vocabulary: int = 13,
    context: int = 8,
    tied: bool = True,
    dropout: float = 0.0,
    attention: str = "eager",
) -> nn.Module:
    """Hugging Face's GPT-2 from a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        tie_word_embeddings=tied,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    config._attn_implementation = attention
    return seeded(3, lambda: GPT2LMHeadModel(config))
