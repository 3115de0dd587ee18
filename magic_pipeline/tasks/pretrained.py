"""Causal language models of transformers: from a local folder, a hub name or a config; with adapters of peft; with frozen layers."""

from __future__ import annotations

import fnmatch
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.hub import offline, refuse_unreachable

# What a config says that changes no number.
_NO_NUMBERS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


@dataclass(frozen=True)
class PretrainedModel:
    """A model that can be built again and again.

    Args:
        source: a folder (relative to `folder`), a hub name, or a config `{model_type: gpt2, ...}` for a model from scratch.
        adapter: `{type: lora, r: 8, ...}`, the fields of peft's config of that type, or `{folder: ...}`, a saved adapter to train on.
        freeze: shell patterns of parameters that are not trained.
        attention: eager, or sdpa (which runs on its MATH backend); None takes sdpa where the model has it.
    """

    source: str | Mapping[str, Any]
    folder: Path
    adapter: Mapping[str, Any] | None
    freeze: Sequence[str]
    attention: str | None

    def config(self) -> Any:
        """transformers' config. Raises InputError."""
        auto = _transformers().AutoConfig
        if isinstance(self.source, str):
            return from_pretrained(auto, self.source, self.folder, "model")
        fields = dict(self.source)
        try:
            return auto.for_model(fields.pop("model_type"), **fields)
        except (KeyError, ValueError, TypeError) as error:
            message = f"is no config: expected model_type and its fields ({offline(error)})"
            raise InputError(message, field="task.model") from error

    def digest_content(self, config: Any) -> dict[str, Any]:
        """What changes numbers and stands in no weight: for the training fingerprint."""
        kept = {name: value for name, value in config.to_dict().items() if name not in _NO_NUMBERS}
        saved = self._adapter_folder()
        settings = None if saved is None else _json(saved / "adapter_config.json")
        return {"config": json.loads(json.dumps(kept, default=str)), "adapter": settings}

    def build(self, config: Any) -> nn.Module:
        """The model, with only what is trained requiring gradients. Raises InputError."""
        auto = _transformers().AutoModelForCausalLM
        if isinstance(self.source, str):
            options = {
                "config": config,
                "attn_implementation": self.attention,
                "dtype": "auto",
                "output_loading_info": True,
            }
            model, loading = from_pretrained(auto, self.source, self.folder, "model", **options)
            if missing := sorted(loading["missing_keys"]):
                message = f"the checkpoint lacks {missing[0]!r} (of {len(missing)}), which would start at random"
                raise InputError(message, field="task.model")
        else:
            try:
                model = auto.from_config(config, attn_implementation=self.attention)
            except (ValueError, ImportError) as error:
                raise InputError(f"the model cannot be built: {offline(error)}", field="task.model") from error
        model = self._adapted(model)
        _freeze(model, self.freeze)
        built: nn.Module = model
        return built

    def _adapter_folder(self) -> Path | None:
        return None if self.adapter is None or "folder" not in self.adapter else self.folder / self.adapter["folder"]

    def _adapted(self, model: Any) -> Any:
        if self.adapter is None:
            return model
        peft = import_extra("peft", extra="hf", needed_by="task.adapter")
        saved, settings = self._adapter_folder(), dict(self.adapter)
        try:
            with warnings.catch_warnings():
                # peft asks transformers by an older name; nobody who fine-tunes can do anything about it.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                if saved is not None:
                    adapted = peft.PeftModel.from_pretrained(model, str(saved), is_trainable=True)
                else:
                    kind = {"peft_type": str(settings.pop("type")).upper(), "task_type": "CAUSAL_LM"}
                    adapted = peft.get_peft_model(model, peft.get_peft_config(kind | settings))
        except Exception as error:
            # peft looks at its settings when it uses them, so anything may come: a bad pattern is a re.error.
            message = f"expected {{type: lora, r: 8, ...}} or {{folder: ...}} as peft knows it: {offline(error)}"
            raise InputError(message, field="task.adapter") from error
        if any(config.is_prompt_learning for config in adapted.peft_config.values()):
            message = "adapters that put tokens of their own in front (prompt and prefix tuning) are not supported"
            raise InputError(message, field="task.adapter")
        return adapted


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A run's log is no place for them."""
    logging = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(source: str, folder: Path) -> Any:
    """transformers' tokenizer, from a folder or a hub name. Raises InputError."""
    tokenizer = from_pretrained(_transformers().AutoTokenizer, source, folder, "tokenizer")
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # So transformers makes one for a folder that has a config and no tokenizer.
        message = f"{source!r} has no tokenizer (no vocabulary but special tokens); name another folder"
        raise InputError(message, field="task.tokenizer")
    return tokenizer


def from_pretrained(auto: Any, source: str, folder: Path, setting: str, **options: Any) -> Any:
    """`auto.from_pretrained` of a folder, of what the hub's cache holds, or of the hub: in this order, and with one error."""
    field, path = f"task.{setting}", folder / source
    load: Callable[..., Any] = auto.from_pretrained
    try:
        with _without_progress_bars():
            return _load(load, source, path, field, options)
    except InputError:
        raise
    except Exception as error:
        why = (
            "its weights have other shapes than its config"
            if "ignore_mismatched_sizes" in str(error)
            else offline(error)
        )
        raise InputError(f"{source!r} cannot be loaded: {why}", field=field) from error


def _load(load: Callable[..., Any], source: str, path: Path, field: str, options: Mapping[str, Any]) -> Any:
    if path.is_dir():
        return load(str(path), local_files_only=True, **options)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise InputError(f"there is no folder {path}", field=field)
    try:
        return load(source, local_files_only=True, **options)
    except (OSError, ValueError):
        refuse_unreachable(source, f"there is no folder {path}, and", field=field)
        return load(source, **options)


def _transformers() -> Any:
    return import_extra("transformers", extra="hf", needed_by="causal_lm")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", file=path, field="task.adapter") from error


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            message = f"no parameter is named like {pattern!r}; there are for example {', '.join(names[:3])}"
            raise InputError(message, field="task.freeze")
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
