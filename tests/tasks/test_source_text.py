"""Documents of source files: which there are, what they hold, in which order."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.errors import InputError
from magic_pipeline.tasks.source_text import Document, read_documents, standard_library

EVERYTHING: dict[str, Any] = {"modules": ["*"], "min_bytes": 1, "max_bytes": None}


def documents(folder: Path | None, **settings: Any) -> list[Document]:
    found = read_documents(folder, **{**EVERYTHING, **settings})
    return sorted([*found.training, *found.held_out], key=lambda document: document.id)


def test_top_level_functions_and_classes_come_with_their_decorators(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    # A form feed ends a line for str.splitlines but not for the parser.
    (tmp_path / "inner" / "m.py").write_bytes(
        b"x = 1\x0c\n@cache\ndef f():\n    return 1\n\nclass C:\n    def g(self): ...\n\n"
        b"if x:\n    def hidden(): ...\n\ndef f(): ...\n"
    )
    assert documents(tmp_path) == [
        Document("inner/m.py:C", b"class C:\n    def g(self): ..."),
        Document("inner/m.py:f", b"@cache\ndef f():\n    return 1"),
        Document("inner/m.py:f#2", b"def f(): ..."),
    ]


def test_a_text_file_is_taken_by_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_bytes(b"\n\none\ntwo\n\n \n\nthree\r\n\r\nfour\n")
    assert [(d.id, d.text) for d in documents(tmp_path)] == [
        ("poem.txt:1", b"one\ntwo"),
        ("poem.txt:2", b"three"),
        ("poem.txt:3", b"four"),
    ]


def test_size_and_module_patterns_choose(tmp_path: Path) -> None:
    for name in ("a/x.txt", "a/y.txt", "b/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("tiny\n\nmiddling\n\nvery long text")
    assert [d.id for d in documents(tmp_path, modules=["a/*"], min_bytes=5, max_bytes=8)] == ["a/x.txt:2", "a/y.txt:2"]
    assert len(documents(tmp_path, modules=["*/x.txt"])) == 6


def test_a_file_of_ones_own_that_is_not_python_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match=r"broken\.py: task\.text_folder: not Python source"):
        documents(tmp_path)


def test_more_files_move_no_document_between_training_and_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {n}" for n in range(200)))
    before = read_documents(tmp_path, **EVERYTHING)
    (tmp_path / "b.txt").write_text("\n\n".join(f"another {n}" for n in range(50)))
    after = read_documents(tmp_path, **EVERYTHING)
    assert [d for d in after.training if d.id.startswith("a.txt")] == list(before.training)
    assert [d for d in after.held_out if d.id.startswith("a.txt")] == list(before.held_out)
    assert 10 <= len(before.held_out) <= 40


def test_the_standard_librarys_functions_are_found_as_they_are_written() -> None:
    found = {document.id: document.text for document in documents(None, modules=["json/*"])}
    assert {"json/decoder.py:JSONDecoder", "json/__init__.py:dumps"} <= found.keys()
    source = (standard_library() / "json" / "decoder.py").read_text()
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "JSONDecoder")
    assert found["json/decoder.py:JSONDecoder"].decode() == ast.get_source_segment(source, node)


def test_tests_and_installed_packages_are_no_part_of_the_standard_library() -> None:
    names = {
        d.id.split(":")[0] for d in documents(None, modules=["test/*", "site-packages/*", "tkinter/*", "*/test/*"])
    }
    assert not names
    assert str(standard_library()).startswith(sys.base_prefix)
