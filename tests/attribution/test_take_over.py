"""A walk that had to wait for its leases looks again at what was done meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from magic_pipeline.attribution.walking import walk
from magic_pipeline.checkpoints import Chain, lease
from tests.attribution.running import keys, open_small, walked


def test_a_query_that_another_process_finishes_before_the_lease_is_free_is_not_walked_again(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking a lease may mean two minutes of watching its holder, who may finish in them."""
    opened = open_small(trained_folder)
    first, second, third = keys(opened)
    take, others = lease.take, [[first, second]]

    def take_after_another(chain: Chain, *args: Any) -> lease.Lease:
        if others and "/queries/" in chain.folder:
            walk(open_small(trained_folder), others.pop())
        return take(chain, *args)

    monkeypatch.setattr(lease, "take", take_after_another)
    report = walk(opened, [first, second, third])
    assert list(report.resumed_from) == [third] and report.steps_redone == 0
    assert [walked(opened, key) for key in (first, second)] == [[(6, 4), (4, 2), (2, 0)]] * 2
    for key in (first, second):
        chain = opened.query_chain(opened.query(key))
        assert chain.sealed() == [] and len(chain.completions()) == 1 and chain.audit() == []
    monkeypatch.undo()
    assert walk(opened, keys(opened)).resumed_from == {}
