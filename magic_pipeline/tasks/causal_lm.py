"""`causal_lm_text`: a small GPT-2-style language model over bytes, on text that every machine has.

By default the documents are the Python standard library's own functions and classes; queries are held-out ones. Tokens
are bytes behind one start token. The documents depend on the Python version; the data's digest says when they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.datasets import InMemoryDataset
from magic_pipeline.tasks.extras import import_extra
from magic_pipeline.tasks.protocol import Query
from magic_pipeline.tasks.query_source import QueryLine, QuerySource, read_query_lines
from magic_pipeline.tasks.settings import check_choice, check_count, check_flag, check_fraction, check_texts
from magic_pipeline.tasks.source_text import read_documents

START = 256  # the one token that is not a byte
VOCABULARY = 257
# Packages that every standard library has: enough documents, and a third of the time that parsing all of it takes.
PACKAGES = ["asyncio/*", "collections/*", "concurrent/*", "email/*", "html/*", "http/*", "importlib/*", "json/*"]
PACKAGES += ["logging/*", "multiprocessing/*", "unittest/*", "urllib/*", "wsgiref/*", "xml/*", "xmlrpc/*"]
IGNORED = -100  # the label of what is not a target


class CausalLMText:
    """Next-byte prediction. An example is the bytes of a document, cut to the context.

    An example's loss is the *sum* of its tokens' cross entropies, the denominator the batch's number of target tokens,
    so the training loss is the mean over tokens. A query's measurement is the mean over its own target tokens.

    Args:
        documents: how many to train on.
        layers, d_model, heads: the size of the GPT-2.
        context: the longest row in tokens, the start token included.
        dropout: in embeddings, attention and residuals.
        tied: whether the output matrix is the embedding matrix.
        attention: `eager`, or `sdpa` (which the engine runs on its MATH backend, the one with a second derivative).
        min_bytes, max_bytes: leave shorter and longer documents out.
        modules: shell patterns of the source files, such as `["json/*", "argparse.py"]`; default PACKAGES, or all files
            of `text_folder`.
        text_folder: a folder beside the experiment file with .py and .txt files, in place of the standard library.
        queries: the split `held_out` (cut to the context like the training documents), or a file of
            `{"id": ..., "text": ...}`.
    """

    def __init__(
        self,
        documents: int = 640,
        layers: int = 2,
        d_model: int = 64,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
        attention: str = "eager",
        min_bytes: int = 32,
        max_bytes: int | None = None,
        modules: Sequence[str] | None = None,
        text_folder: str | None = None,
        folder: Path | None = None,
        queries: QuerySource | None = None,
    ) -> None:
        self.layers, self.heads = (check_count("layers", layers), check_count("heads", heads))
        self.d_model = check_count("d_model", d_model)
        if d_model % heads:
            raise InputError(f"expected a multiple of heads ({heads}), found {d_model}", field="task.d_model")
        self.context = check_count("context", context, at_least=2)
        self.dropout = check_fraction("dropout", dropout)
        self.tied = check_flag("tied", tied)
        self.attention = check_choice("attention", attention, ("eager", "sdpa"))
        self.query_source = queries
        if modules is None:
            modules = PACKAGES if text_folder is None else ["*"]
        found = read_documents(
            None if text_folder is None else (folder or Path()) / text_folder,
            modules=check_texts("modules", modules),
            min_bytes=check_count("min_bytes", min_bytes),
            max_bytes=None if max_bytes is None else check_count("max_bytes", max_bytes, at_least=min_bytes),
        )
        if len(found.training) < check_count("documents", documents):
            message = f"only {len(found.training)} documents fit the settings, {documents} are asked for"
            raise InputError(message, field="task.documents")
        self._train, self._held_out = found.training[:documents], found.held_out

    def build_model(self) -> nn.Module:
        """transformers' GPT2LMHeadModel, freshly initialised."""
        transformers = import_extra("transformers", extra="hf", needed_by="causal_lm_text")
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=self.context,
            n_embd=self.d_model,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            tie_word_embeddings=self.tied,
            bos_token_id=START,
            eos_token_id=None,
            use_cache=False,
            attn_implementation=self.attention,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model

    def training_data(self) -> InMemoryDataset:
        """The training documents, cut to the context, with ids like `json/decoder.py:JSONDecoder`."""
        return InMemoryDataset((self._cut(d.text) for d in self._train), (d.id for d in self._train))

    def queries(self) -> Sequence[Query]:
        """Held-out documents or the file's texts, as the `queries:` section says."""
        source = self.query_source
        if source is None:
            raise InputError("expected a queries: section, for example {split: held_out, count: 6}", field="queries")
        if source.file is not None:
            return [self._query(line) for line in read_query_lines(source.file)]
        source.check_split("held_out")
        if (source.count or 1) > len(self._held_out):
            message = f"the split held_out has {len(self._held_out)} documents, not {source.count or 1}"
            raise InputError(message, field="queries.count")
        return [Query(d.id, [self._cut(d.text)]) for d in self._held_out[: source.count]]

    def _query(self, line: QueryLine) -> Query:
        line.check_fields(required=frozenset({"text"}))
        text = line.fields["text"]
        if not isinstance(text, str) or not text:
            raise line.error("expected text of at least one character, since an empty query has no target token")
        content = text.encode("utf-8", "surrogatepass")
        if len(content) + 1 > self.context:
            message = f"the text is {len(content)} bytes long; at most {self.context - 1} fit into the context"
            raise line.error(message)
        return Query(line.id, [content])

    def _cut(self, text: bytes) -> bytes:
        return text[: self.context - 1]

    def collate(self, examples: Sequence[bytes], /) -> dict[str, Tensor]:
        """tokens and labels [rows, longest row] int64; a label is the token at its own place, or IGNORED.

        Padding is on the right, where causal attention never looks, so it needs no attention mask.
        """
        width = 1 + max(len(text) for text in examples)
        tokens = torch.full((len(examples), width), START)
        labels = torch.full((len(examples), width), IGNORED)
        for row, text in enumerate(examples):
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
            tokens[row, 1 : 1 + len(text)] = content
            labels[row, 1 : 1 + len(text)] = content
        return {"tokens": tokens, "labels": labels}

    def example_losses(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        """The sum of each row's cross entropies [rows], in the model's dtype."""
        logits: Tensor = model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        by_token = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return by_token.view_as(targets).sum(1)

    def denominator(self, batch: dict[str, Tensor], /) -> float:
        """The number of target tokens."""
        return float(_targets(batch).sum())

    def measurement(self, model: nn.Module, batch: dict[str, Tensor], /) -> Tensor:
        """The mean cross entropy over each row's own target tokens [rows]."""
        return self.example_losses(model, batch) / _targets(batch)

    def render(self, example: bytes) -> str:
        """The text that the model sees."""
        return example.decode("utf-8", "replace")


def _targets(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum(1)
