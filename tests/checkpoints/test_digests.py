"""Fingerprints, digests of tensors, JSON objects with their digest."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magic_pipeline.checkpoints import fingerprint, tensors_digest
from magic_pipeline.checkpoints.documents import document_bytes, document_content
from magic_pipeline.errors import DamagedObjectError, InputError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_a_fingerprint_is_fixed_for_ever() -> None:
    text = rb'{"a":{"\u00e9":true},"b":[1,2.5,null]}'
    assert fingerprint({"b": [1, 2.5, None], "a": {"é": True}}) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    "other", [{"x": 2}, {"x": 1.0}, {"x": True}, {"x": "1"}, {"x": [1]}, {"y": 1}, {"x": 1, "y": None}]
)
def test_any_difference_is_another_fingerprint(other: dict[str, object]) -> None:
    assert fingerprint({"x": 1}) != fingerprint(other)


def test_a_fingerprint_does_not_depend_on_order_or_on_tuples() -> None:
    assert fingerprint({"a": (1, 2), "b": {"c": 0, "d": 1}}) == fingerprint({"b": {"d": 1, "c": 0}, "a": [1, 2]})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_refused_by_field(number: float) -> None:
    with pytest.raises(InputError, match=r"optimizer\.betas\[1\]: expected a finite number"):
        fingerprint({"optimizer": {"betas": [0.9, number]}})


@pytest.mark.parametrize("content", [{1: 2}, {"a": {None: 1}}, {"a": {1, 2}}, {"a": torch.ones(1)}, {"a": b"x"}])
def test_what_json_would_change_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"expected text as key|has no JSON form"):
        fingerprint(content)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_documents_come_back(content: dict[str, object]) -> None:
    assert document_content(document_bytes(content), "x") == content


def test_every_flipped_bit_and_every_truncation_of_a_document_is_found() -> None:
    whole = document_bytes({"a b": [1, 2.5, None, True], "é": "x y", "facts": {"lr": 0.001}})
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedObjectError, match=r"^plan.json: "):
            document_content(bytes(damaged), "plan.json")
    for length in range(len(whole)):
        with pytest.raises(DamagedObjectError, match=r"^plan.json: "):
            document_content(whole[:length], "plan.json")


def test_altered_content_is_told_from_garbage() -> None:
    altered = document_bytes({"lr": 0.1}).replace(b"0.1", b"0.2")
    with pytest.raises(
        DamagedObjectError, match=r"plan.json: expected content of digest xxh3_128:\w+, found xxh3_128:\w+"
    ):
        document_content(altered, "plan.json")


def test_a_tensors_digest_is_of_values_and_not_of_memory() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    digest = tensors_digest({"a": matrix, "b": torch.tensor(1)})
    assert digest.startswith("xxh3_128:")
    assert digest == tensors_digest({"b": torch.tensor(1), "a": matrix.T.contiguous().T})
    wide = torch.zeros(5, 3, 4)
    wide[2] = matrix
    assert digest == tensors_digest({"a": wide[2].requires_grad_(), "b": torch.tensor(1)})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([0.0, -0.0])},
        {"a": torch.tensor([0.0, 0.0], dtype=torch.float64)},
        {"a": torch.tensor([0, 0], dtype=torch.int32)},
        {"a": torch.zeros(2, 1)},
        {"b": torch.zeros(2)},
        {"a": torch.zeros(1), "b": torch.zeros(1)},
        {"a": torch.zeros(2), "b": torch.zeros(0)},
    ],
)
def test_any_difference_in_names_types_shapes_or_bits_is_another_digest(other: dict[str, torch.Tensor]) -> None:
    assert tensors_digest({"a": torch.zeros(2)}) != tensors_digest(other)


def test_importing_the_room_and_reading_json_do_not_import_torch() -> None:
    program = """
import sys, tempfile
from magic_pipeline.checkpoints import Chain, Store, fingerprint
store = Store(tempfile.mkdtemp())
store.create_json("a.json", {"n": 1})
assert store.read_json("a.json") == {"n": 1}
with Chain(store, "q").take():
    assert Chain(store, "q").newest({}, order="lowest") is None
assert Chain(store, "q").audit() == []
assert "torch" not in sys.modules and "numpy" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
