"""One task for all models of the zoo: token rows, feature rows, sequences or pictures, drawn from a seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.protocol import Query

VOCABULARY, LENGTH, CLASSES, EXAMPLES, QUERIES = 13, 6, 3, 8, 2
TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "attn_implementation": "sdpa"}
WIDE: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "attn_implementation": "sdpa"}
    drops: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **drops))


def gpt2_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(gpt2(), config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **TINY, **WIDE))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=1, head_dim=4, **TINY, **WIDE))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(num_key_value_heads=1, head_dim=4, **TINY, **WIDE))


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**TINY, **WIDE))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    drops: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
    return BertForSequenceClassification(BertConfig(**TINY, **WIDE, **drops))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": CLASSES}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
    return ViTForImageClassification(ViTConfig(**sizes, **WIDE))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1]}
    sizes["num_labels"] = CLASSES
    # ReLU has kinks, at which differences say nothing.
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", hidden_act="silu", **sizes))


class Recurrent(nn.Module):
    """An LSTM over features, its last state into classes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        logits: Tensor = self.head(states[:, -1])
        return logits


def lstm() -> nn.Module:
    return Recurrent()


def mlp_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


BUILD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "tokens"),
    "gpt2-lora": (gpt2_lora, "tokens"),
    "llama-gqa": (llama, "tokens"),
    "qwen3": (qwen3, "tokens"),
    "gemma": (gemma, "tokens"),
    "gpt-neox": (gpt_neox, "tokens"),
    "bert-classifier": (bert, "token classes"),
    "vit": (vit, "pictures"),
    "resnet-batchnorm": (resnet, "pictures"),
    "lstm": (lstm, "sequences"),
    "mlp-layernorm-dropout": (mlp_dropout, "features"),
}


class Zoo:
    """A model of the zoo on data drawn for it.

    Args:
        model: its name in BUILD.
        without_casts: whether RMSNorms compute in the model's dtype; the stock ones cast to float32 and back.
    """

    def __init__(self, model: str, without_casts: bool = True) -> None:
        self.build, self.kind = BUILD[model]
        self.without_casts = without_casts
        generator = torch.Generator().manual_seed(0)
        rows = EXAMPLES + QUERIES
        shapes = {"features": (5,), "sequences": (LENGTH, 5), "pictures": (1, 8, 8)}
        self.inputs = (
            torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
            if self.kind.startswith("token")
            else torch.randn(rows, *shapes[self.kind], generator=generator, dtype=torch.float64)
        )
        self.classes = torch.randint(CLASSES, (rows,), generator=generator)

    def build_model(self) -> nn.Module:
        model = self.build()
        for module in model.modules():
            if self.without_casts and type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(_rms_norm, module)  # a method, so that a copy has its own
        return model

    def training_data(self) -> InMemoryDataset:
        return InMemoryDataset([self._example(row) for row in range(EXAMPLES)], [f"e{row}" for row in range(EXAMPLES)])

    def queries(self) -> Sequence[Query]:
        return [Query(f"q{row}", [self._example(EXAMPLES + row)]) for row in range(QUERIES)]

    def collate(self, examples: Sequence[tuple[Tensor, Tensor]], /) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        found = model(batch["x"])
        logits: Tensor = found if isinstance(found, Tensor) else found.logits
        if self.kind != "tokens":
            return F.cross_entropy(logits, batch["y"], reduction="none")
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["x"][:, 1:], reduction="none")
        return each.mean(1)

    def _example(self, row: int) -> tuple[Tensor, Tensor]:
        return self.inputs[row], self.classes[row]


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm's formula in the dtype of its input. Gemma's weight counts from 1."""
    epsilon = next(float(vars(norm)[name]) for name in ("variance_epsilon", "eps") if name in vars(norm))
    offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
    weight = cast(Tensor, norm.weight)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (weight + offset)
