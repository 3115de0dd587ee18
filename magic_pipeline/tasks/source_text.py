"""Documents of source code and text: every top-level function and class of .py files, every paragraph of .txt files.

The order and the held-out part are decided by each document's id alone, so that asking for more documents adds some and
moves none.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from magic_pipeline.errors import InputError

# Tests, generated tables, and what some distributions leave out of the standard library.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"test", "tests", "tkinter", "turtledemo"}
)
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Document:
    """One document: its id (`json/decoder.py:JSONDecoder`, `poems.txt:3`) and its bytes."""

    id: str
    text: bytes


@dataclass(frozen=True)
class Documents:
    """Documents to train on, and held-out ones (about one in eight), both in the order of their ids' SHA-256."""

    training: Sequence[Document]
    held_out: Sequence[Document]


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(folder: Path | None, *, modules: Sequence[str], min_bytes: int, max_bytes: int | None) -> Documents:
    """The documents of a folder's .py and .txt files, or of the standard library's sources if `folder` is None.

    Args:
        modules: shell patterns of file paths below the folder, such as `json/*`; a file counts if one of them matches.
        min_bytes, max_bytes: documents outside this range are left out.

    Raises:
        InputError: the folder is missing, or one of its own files is not Python or not text.
    """
    root = standard_library() if folder is None else folder
    if not root.is_dir():
        raise InputError("expected a folder of .py or .txt files, found none", file=root, field="task.text_folder")
    matching = (
        document
        for name in _file_names(root, own=folder is not None)
        if any(fnmatchcase(name, pattern) for pattern in modules)
        for document in _file_documents(root, name, own=folder is not None)
    )
    fitting = [d for d in matching if min_bytes <= len(d.text) and (max_bytes is None or len(d.text) <= max_bytes)]
    shuffled = sorted(fitting, key=lambda document: _hash(document.id))
    return Documents(
        training=[document for document in shuffled if not _is_held_out(document.id)],
        held_out=[document for document in shuffled if _is_held_out(document.id)],
    )


def _hash(identity: str) -> bytes:
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).digest()


def _is_held_out(identity: str) -> bool:
    return _hash(identity)[-1] % HELD_OUT_ONE_IN == 0


def _file_names(root: Path, *, own: bool) -> list[str]:
    suffixes = (".py", ".txt") if own else (".py",)
    names = []
    for folder, inner, files in os.walk(root):
        # Pruned while walking: site-packages is larger than all the rest.
        inner[:] = [name for name in inner if name != "__pycache__" and (own or not _is_skipped(name))]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(suffixes)]
    return sorted(names)


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith("config-")


@cache  # parsing the whole standard library takes seconds, and its files do not change under a running Python
def _standard_library_documents(root: Path, name: str) -> tuple[Document, ...]:
    try:
        return tuple(_definitions(name, (root / name).read_bytes()))
    except (SyntaxError, ValueError):
        return ()  # some distributions carry templates that are not Python


def _file_documents(root: Path, name: str, *, own: bool) -> Sequence[Document]:
    if not own:
        return _standard_library_documents(root, name)
    content = (root / name).read_bytes()
    if name.endswith(".txt"):
        return list(_paragraphs(name, content))
    try:
        return list(_definitions(name, content))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"not Python source ({error})", file=root / name, field="task.text_folder") from error


def _definitions(name: str, source: bytes) -> Iterator[Document]:
    """Top-level functions and classes with their decorators; a name that comes again is `name#2`, `name#3`, ..."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's sources
        module = ast.parse(source)
    lines = source.splitlines(keepends=True)  # of bytes: at \n, \r and \r\n only, which is how the parser counts
    seen: Counter[str] = Counter()
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            seen[node.name] += 1
            again = f"#{seen[node.name]}" if seen[node.name] > 1 else ""
            yield Document(f"{name}:{node.name}{again}", b"".join(lines[first - 1 : node.end_lineno]).rstrip())


def _paragraphs(name: str, content: bytes) -> Iterator[Document]:
    """Parts between blank lines, counted from 1."""
    parts = (part.strip() for part in re.split(rb"(?:\r?\n[ \t]*){2,}", content))
    for number, part in enumerate((part for part in parts if part), start=1):
        yield Document(f"{name}:{number}", part)
