"""From records to rows of tokens with labels: whole texts, prompts with completions, chats; truncated or packed.

A label is the token at its own place where it is a target, else IGNORED. The first token of a document is never one: nothing of its own
document comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset, content_digest
from magic_pipeline.tasks.records import Record

IGNORED = -100


@dataclass(frozen=True)
class TokenRow:
    """One row of a batch: one document, or several that were packed.

    Attributes:
        tokens, labels: `[tokens]` int64.
        part: `[tokens]` int64, which document of the row each token is of, from 0.
        first: the number of the row's first document in the training data.
    """

    tokens: Tensor
    labels: Tensor
    part: Tensor
    first: int = 0


@dataclass(frozen=True)
class Encoder:
    """Makes rows of records.

    Attributes:
        tokenizer: of transformers.
        columns: role (text; prompt and completion; messages) to column.
        context: the longest row in tokens.
        vocabulary: how many tokens the model has embeddings for.
        end: whether a text or a completion ends in the tokenizer's end token, as a target.
    """

    tokenizer: Any
    columns: Mapping[str, str]
    context: int
    vocabulary: int
    end: bool

    def encode(self, record: Record, *, truncate: bool) -> TokenRow:
        """The record as a row of its own.

        Raises:
            InputError: naming file, row and id: a column is missing or empty, no token is a target, or the row is longer than the
                context and must not be truncated.
        """
        segments = self._segments(record)
        tokens = torch.tensor([token for ids, _ in segments for token in ids], dtype=torch.int64)
        wanted = torch.tensor([target for ids, target in segments for _ in ids], dtype=torch.bool)
        if len(tokens) > self.context and not truncate:
            raise record.error(f"is {len(tokens)} tokens long; the context holds {self.context}")
        length = len(tokens)
        tokens, wanted = tokens[: self.context], wanted[: self.context]
        if len(tokens) and int(tokens.max()) >= self.vocabulary:
            message = f"the tokenizer gives the token {int(tokens.max())}, but the model has {self.vocabulary}"
            raise record.error(message + ": they do not belong together")
        wanted[:1] = False
        if not bool(wanted.any()):
            cut = f" after truncation of {length} tokens to {self.context}" if length > self.context else ""
            why = (
                "only the assistant's turns are targets" if "messages" in self.columns else "a document's first is none"
            )
            raise record.error(f"has no target token{cut} ({why})")
        return TokenRow(tokens, tokens.masked_fill(~wanted, IGNORED), torch.zeros_like(tokens))

    def _segments(self, record: Record) -> list[tuple[list[int], bool]]:
        """Token ids, and whether they are targets."""
        if "messages" in self.columns:
            return self._chat(record)
        if "text" in self.columns:
            return [(self._ended(self._opening(record.text(self.columns["text"]))), True)]
        prompt, completion = (record.text(self.columns[role]) for role in ("prompt", "completion"))
        return [(self._opening(prompt), False), (self._ended(self._plain(completion)), True)]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _opening(self, text: str) -> list[int]:
        """With what the tokenizer puts in front (a start token), and without what it may put behind."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [*ids, end] if self.end and end is not None else ids

    def _chat(self, record: Record) -> list[tuple[list[int], bool]]:
        """The assistant's turns are targets, with what the template ends them with."""
        messages = record.column(self.columns["messages"])
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise record.error("messages should be a list of {role: ..., content: ...} with texts")
        whole, at, segments = self._rendered(record, messages), 0, list[tuple[list[int], bool]]()
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(record, messages[:number], answer=True) if number else ""
            after = self._rendered(record, messages[: number + 1])
            if not (after.startswith(before) and whole.startswith(after) and len(before) >= at):
                raise record.error(
                    f"the chat template renders the turns before message {number + 1} differently from the whole chat, so its targets "
                    "cannot be told; use a template that only appends"
                )
            segments += [(self._plain(before[at:]), False), (self._plain(after[len(before) :]), True)]
            at = len(after)
        return [*segments, (self._plain(whole[at:]), False)]

    def _rendered(self, record: Record, messages: Sequence[Mapping[str, str]], *, answer: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except Exception as error:
            raise record.error(f"the tokenizer's chat template refuses it: {error}") from error
        return text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def find_columns(columns: Mapping[str, Any] | None, record: Record) -> dict[str, str]:
    """Role to column: as the setting says, else by the first record's own names.

    Raises:
        InputError: the roles are not text, or prompt and completion, or messages; or no column has such a name.
    """
    wanted: list[set[str]] = [{"messages"}, {"prompt", "completion"}, {"text"}]
    if columns is None:
        for roles in wanted:
            if roles <= set(record.columns):
                return {role: role for role in roles}
        raise record.error(
            f"has no column text, no prompt and completion, no messages; it has {', '.join(sorted(record.columns))}: say which is "
            "which in task.columns"
        )
    found: Any = columns  # as the experiment file has it
    if not isinstance(found, Mapping) or set(found) not in wanted or not all(map(_is_text, found.values())):
        message = f"expected {{text: ...}}, {{prompt: ..., completion: ...}} or {{messages: ...}}, found {found!r}"
        raise InputError(message, field="task.columns")
    return {role: str(name) for role, name in columns.items()}


class PackedRows(InMemoryDataset):
    """Whole documents, in their order, as many to a row as fit.

    Attributes:
        documents: the ids of all documents; `TokenRow.first` counts in them.
    """

    def __init__(self, rows: Sequence[TokenRow], ids: Sequence[str], context: int) -> None:
        groups, length = list[list[int]](), context + 1
        for index, row in enumerate(rows):
            if length + len(row.tokens) > context:
                groups.append([])
                length = 0
            groups[-1].append(index)
            length += len(row.tokens)
        super().__init__(
            [_joined([rows[index] for index in group], group[0]) for group in groups],
            [f"rows {group[0] + 1}-{group[-1] + 1}" for group in groups],
        )
        self.documents = tuple(ids)

    @cached_property
    def digest(self) -> str:
        """Of the rows and of the documents' ids."""
        return content_digest([list(self.ids), list(self), list(self.documents)])


def _joined(rows: Sequence[TokenRow], first: int) -> TokenRow:
    part = torch.cat([torch.full_like(row.tokens, number) for number, row in enumerate(rows)])
    together = TokenRow(torch.cat([row.tokens for row in rows]), torch.cat([row.labels for row in rows]), part)
    return replace(together, first=first)
