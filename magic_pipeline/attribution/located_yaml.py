"""YAML into plain data, together with the line of every field. Knows nothing of experiments.

Scalars are read by YAML 1.2's core schema, not by PyYAML's YAML 1.1: `1e-3` is a number, `no` and `12:30` are strings,
`010` is ten. Duplicate keys, keys that are not strings, tags for Python objects and recursive aliases are
refused.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from magic_pipeline.errors import InputError

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with YAML 1.2's core schema, merge keys, and strict mappings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = True) -> dict[Hashable, Any]:
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            if key.tag != _TAG + "str":
                raise ConstructorError(None, None, "field names must be strings; put quotes around it", key.start_mark)
            if key.value in first_lines:
                message = f"the field {key.value!r} is given twice (first on line {first_lines[key.value]})"
                raise ConstructorError(None, None, message, key.start_mark)
            first_lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=True)


def _sequence(loader: _CoreLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _string(loader: _CoreLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


def _null(loader: _CoreLoader, node: yaml.ScalarNode) -> None:
    return None


def _boolean(loader: _CoreLoader, node: yaml.ScalarNode) -> bool:
    return str(node.value).lower() == "true"


def _integer(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    return int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)


def _float(loader: _CoreLoader, node: yaml.ScalarNode) -> float:
    return float(node.value)


# Mappings and sequences are built at once, not by a generator as PyYAML does: an alias inside itself is then an error.
_CoreLoader.yaml_constructors = {
    _TAG + "map": _CoreLoader.construct_mapping,
    _TAG + "seq": _sequence,
    _TAG + "str": _string,
    _TAG + "null": _null,
    _TAG + "bool": _boolean,
    _TAG + "int": _integer,
    _TAG + "float": _float,
    None: _CoreLoader.construct_undefined,
}
_CoreLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
):
    # PyYAML looks resolvers up by the scalar's first character; "" stands for the empty scalar.
    first_characters = [character.replace("\0", "") for character in _first]
    _CoreLoader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})$"), first_characters)


@dataclass(frozen=True)
class LocatedYaml:
    """Plain data (dict, list, str, int, float, bool, None), the nodes it was made from, and their text."""

    content: Any
    root: yaml.Node | None
    text: str = ""

    def text_without(self, field: str) -> str:
        """The text, "(not shown)" in place of the value of a field of the outermost mapping."""
        fields = self.root.value if isinstance(self.root, yaml.MappingNode) else ()
        for key, value in fields:
            if key.value == field:
                start, end = value.start_mark.index, value.end_mark.index
                # A block ends where the next field begins: the line break before that stays.
                hidden = self.text[start:end].rstrip()
                return f"{self.text[:start]}(not shown){self.text[start + len(hidden) :]}"
        return self.text

    def line(self, location: Sequence[str | int]) -> int | None:
        """The line, from 1, of the field at `location` or of its nearest parent in the file; None at the root."""
        node, line = self.root, None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                # The last one: a merged key comes before the key that overrides it.
                found = [(key, value) for key, value in node.value if key.value == part][-1:]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                found = [(item, item) for item in node.value[part : part + 1]]
            else:
                found = []
            if not found:
                break
            key, node = found[0]
            line = key.start_mark.line + 1
        return line


def read_yaml(path: Path) -> LocatedYaml:
    """The one document in `path`. An empty document is None.

    Raises:
        InputError: the file cannot be read, is not UTF-8 or UTF-16, or is not the YAML described above.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError("there is no such file", file=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from error
    loader = None
    try:
        loader = _CoreLoader(text)
        root = loader.get_single_node()
        return LocatedYaml(None if root is None else loader.construct_document(root), root, _decoded(text))
    except yaml.MarkedYAMLError as error:
        # Never the snippet that str(error) shows: the line may hold a credential.
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context
        raise InputError(f"not valid YAML: {message}", file=path, line=mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise InputError(f"not valid YAML: {reason}", file=path) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid YAML: {error}", file=path) from None
    finally:
        if loader is not None:
            loader.dispose()


def _decoded(text: bytes) -> str:
    """As the loader reads it, a byte order mark included, so that its marks count the same characters."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return text.decode("utf-16-le" if text.startswith(codecs.BOM_UTF16_LE) else "utf-16-be")
    return text.decode("utf-8")
