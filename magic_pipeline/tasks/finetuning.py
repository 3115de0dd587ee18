"""`causal_lm`: fine-tuning of a Hugging Face causal language model as people do it, from an experiment file alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset, content_digest
from magic_pipeline.tasks.measurements import log_odds
from magic_pipeline.tasks.pretrained import PretrainedModel, load_tokenizer
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QueryLine, QuerySource, read_query_lines
from magic_pipeline.tasks.records import Record, read_records
from magic_pipeline.tasks.settings import check_choice, check_count, check_flag, check_texts
from magic_pipeline.tasks.token_rows import IGNORED, Encoder, PackedRows, TokenRow, find_columns

Batch = dict[str, Tensor]


class CausalLM:
    """Next-token prediction. An example is a document: a text, a prompt with its completion, or a chat.

    Losses are `[rows, tokens]`; the denominator is the batch's number of target tokens, so the training loss is the mean over
    them. A query measures the mean loss of its own target tokens; with `measurement: log_likelihood` the log-probability of all of
    them together, with `log_odds` the mean of log(p / (1 - p)).

    Args:
        model: a folder beside the experiment file with a checkpoint, a hub name, or a config `{model_type: gpt2, ...}`.
        data: a .txt, .jsonl, .csv or .parquet file, a folder of .txt files or a saved dataset, or a hub name (records.py).
        tokenizer: a folder or a hub name; null takes the model's.
        columns: `{text: name}`, `{prompt: name, completion: name}` or `{messages: name}`; null takes the columns of these names. With
            prompts and chats, the loss is on completions and on the assistant's turns only.
        id_column: the column of the examples' ids; null takes `id` where there is one, else `{file}:{row}`.
        split: of a dataset with splits.
        context: the longest row in tokens; longer documents are cut. Null takes the model's.
        packing: null (a document a row); joined (rows of several whole documents that see each other, as in pretraining); isolated
            (each sees only itself, with positions of its own).
        end_token: whether texts and completions end in the tokenizer's end token, as a target.
        adapter: `{type: lora, r: 8, lora_alpha: 16, target_modules: [...]}` or any of peft's; only its parameters are trained.
        freeze: shell patterns of parameters that are not trained.
        attention: eager or sdpa; null takes sdpa where the model has it, which casts less to float32 than many an eager softmax.
        queries: a file of lines like the data's, or `{"id", "examples": [...], "coefficients": [...]}`, or `{"id", "positive": [...],
            "negative": [...]}`; or a split of the dataset.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any],
        data: str,
        tokenizer: str | None = None,
        columns: Mapping[str, Any] | None = None,
        id_column: str | None = None,
        split: str = "train",
        context: int | None = None,
        packing: str | None = None,
        end_token: bool = True,
        adapter: Mapping[str, Any] | None = None,
        freeze: Sequence[str] = (),
        attention: str | None = None,
        folder: Path | None = None,
        queries: QuerySource | None = None,
    ) -> None:
        self._folder, self._source = folder or Path(), data
        self._id_column, self._query_source, self._columns = id_column, queries, columns
        self.packing = None if packing is None else check_choice("packing", packing, ("joined", "isolated"))
        if not isinstance(model, (str, Mapping)) or not isinstance(data, str):
            setting, found = ("data", data) if isinstance(model, (str, Mapping)) else ("model", model)
            kinds = "a folder or a name on the hub" + (", or a config" if setting == "model" else ", or a file")
            raise InputError(f"expected {kinds}, found {found!r}", field=f"task.{setting}")
        self._model = PretrainedModel(
            model,
            self._folder,
            adapter,
            check_texts("freeze", freeze) if freeze else (),
            None if attention is None else check_choice("attention", attention, ("eager", "sdpa")),
        )
        if tokenizer is None and not isinstance(model, str):
            raise InputError("a model from a config has no tokenizer of its own; name one", field="task.tokenizer")
        self._records = read_records(data, folder=self._folder, split=split, id_column=id_column)
        self._config = self._model.config()
        self.tokenizer = load_tokenizer(tokenizer or str(model), self._folder)
        self._encoder = Encoder(
            self.tokenizer,
            find_columns(columns, self._records[0]),
            self._fitting(context),
            int(self._config.get_text_config().vocab_size),
            check_flag("end_token", end_token),
        )
        if "messages" in self._encoder.columns and self.tokenizer.chat_template is None:
            raise InputError("chats need a tokenizer with a chat template", field="task.tokenizer")
        self.version = "1 " + content_digest(self._model.digest_content(self._config))

    @property
    def measurements(self) -> Mapping[str, Callable[[nn.Module, Batch], Tensor]]:
        """What a query can measure beside the mean loss."""
        return {"log_likelihood": self._log_likelihood, "log_odds": self._log_odds}

    def build_model(self) -> nn.Module:
        """The checkpoint (or a fresh model), with its adapter, and gradients for what is trained alone."""
        return self._model.build(self._config)

    def training_data(self) -> InMemoryDataset:
        """The documents, or rows of packed ones."""
        return self._data

    @cached_property
    def _data(self) -> InMemoryDataset:
        rows = [self._encoder.encode(record, truncate=True) for record in self._records]
        ids = [record.id for record in self._records]
        return InMemoryDataset(rows, ids) if self.packing is None else PackedRows(rows, ids, self._encoder.context)

    def queries(self) -> Sequence[Query]:
        """Lines of the file, or records of the split."""
        source = self._query_source
        if source is None:
            raise InputError("expected a queries: section, for example {file: queries.jsonl}", field="queries")
        if source.file is not None:
            return [self._query(line) for line in read_query_lines(source.file)]
        if (self._folder / self._source).is_file():
            raise InputError("the data is one file and has no splits; take queries: {file: ...}", field="queries.split")
        records = read_records(self._source, folder=self._folder, split=source.split or "", id_column=self._id_column)
        if source.count is not None and source.count > len(records):
            message = f"the split {source.split} has {len(records)} records, not {source.count}"
            raise InputError(message, field="queries.count")
        chosen = records[: source.count]
        return [Query(record.id, [self._encoder.encode(record, truncate=False)]) for record in chosen]

    def _query(self, line: QueryLine) -> Query:
        examples, coefficients = line.weighted_examples(frozenset(self._encoder.columns.values()))
        records = [Record(line.file, line.number, line.id, fields) for fields in examples]
        rows = [self._encoder.encode(record, truncate=False) for record in records]
        with line.naming():
            return Query(line.id, rows, coefficients, line.fields.get("measurement"))

    def collate(self, examples: Sequence[TokenRow], /) -> Batch:
        """tokens, labels, part and document [rows, longest row] int64: padded on the right, where causal attention never looks."""
        padding = {"tokens": 0, "labels": IGNORED, "part": -1, "documents": -1}
        width = max(len(row.tokens) for row in examples)
        batch = {name: torch.full((len(examples), width), value) for name, value in padding.items()}
        for number, row in enumerate(examples):
            filled = {"tokens": row.tokens, "labels": row.labels, "part": row.part, "documents": row.part + row.first}
            for name, values in filled.items():
                batch[name][number, : len(values)] = values
        return batch

    def example_losses(self, model: nn.Module, batch: Batch, /) -> Tensor:
        """Cross entropies [rows, tokens] in the model's dtype; column s is that of the target at s, 0 where there is none."""
        logits, targets = self._logits(model, batch), batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return F.pad(losses.view_as(targets), (1, 0))

    def denominator(self, batch: Batch, /) -> float:
        """The number of target tokens."""
        return float((batch["labels"] != IGNORED).sum())

    def measurement(self, model: nn.Module, batch: Batch, /) -> Tensor:
        """The mean loss of each row's own target tokens [rows]."""
        return self.example_losses(model, batch).sum(1) / (batch["labels"] != IGNORED).sum(1)

    def units(self, batch: Batch, /) -> Tensor | None:
        """The documents of packed rows."""
        return None if self.packing is None else batch["documents"]

    def token_ids(self, batch: Batch, /) -> Tensor:
        """The tokens, -1 on padding."""
        return batch["tokens"].masked_fill(batch["part"] < 0, -1)

    def token_labels(self, batch: Batch, /) -> Tensor:
        """The targets."""
        return batch["labels"]

    def token_text(self, ids: Sequence[int], /) -> list[str]:
        """Each token as text."""
        return [self.tokenizer.decode([int(token)]) for token in ids]

    def render(self, example: TokenRow, /) -> str:
        """The text that the model sees."""
        text: str = self.tokenizer.decode(example.tokens.tolist())
        return text

    def render_document(self, document: str, /) -> str:
        """The text of the first document with this id."""
        found = next(record for record in self._records if record.id == document)
        return self.render(self._encoder.encode(found, truncate=True))

    def _fitting(self, context: int | None) -> int:
        longest = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        if context is None and longest is None:
            raise InputError("the model's config names no longest context; say it here", field="task.context")
        chosen = check_count("context", longest if context is None else context, at_least=2)
        if longest is not None and chosen > longest:
            raise InputError(f"{chosen} tokens are more than the model's {longest} positions", field="task.context")
        window = getattr(self._config.get_text_config(), "sliding_window", None)
        if self.packing == "isolated" and window is not None and window < chosen:
            message = (
                f"isolated has no sliding window, and the model's ({window}) is shorter than the context ({chosen})"
            )
            raise InputError(message, field="task.packing")
        return chosen

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """`[rows, tokens - 1, vocabulary]`: what predicts the tokens from the second on."""
        own = self._alone(batch, next(model.parameters()).dtype) if self.packing == "isolated" else {}
        logits: Tensor = model(input_ids=batch["tokens"], use_cache=False, **own).logits
        return logits[:, :-1]

    def _alone(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """A mask [rows, 1, tokens, tokens] added to attention, and positions that begin anew with each document."""
        part = batch["part"]
        seen = (part.unsqueeze(2) == part.unsqueeze(1)).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=part.device).masked_fill(~seen, torch.finfo(dtype).min)
        return {"attention_mask": mask.unsqueeze(1), "position_ids": seen.sum(2) - 1}

    def _log_likelihood(self, model: nn.Module, batch: Batch) -> Tensor:
        return -self.example_losses(model, batch).sum(1)

    def _log_odds(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = batch["labels"][:, 1:]
        wanted = targets != IGNORED
        by_token = log_odds(self._logits(model, batch), targets.clamp(min=0))
        return torch.where(wanted, by_token, 0.0).sum(1) / wanted.sum(1)
