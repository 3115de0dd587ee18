"""docs/causal_lm.md, run as it stands: its files, its commands' work, and the numbers that it shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.planning import plan_experiment
from tests.attribution.test_units import tables

PAGE = Path(__file__).parents[2] / "docs" / "causal_lm.md"


def test_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"`([\w.]+)`\n```\w+\n(.*?)```", text, re.DOTALL)
    assert {"tuned.yaml", "capitals.jsonl", "queries.jsonl", "make_checkpoint.py", "show.py"} == {n for n, _ in files}
    for name, content in files:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make_checkpoint.py")
    opened = open_experiment(load_experiment("tuned.yaml"))
    lines = plan_experiment(opened).lines()
    planned = re.search(r'plan tuned\.yaml +# "(.*)"', text)
    assert planned is not None and any(planned[1] in line for line in lines)
    tables(opened)
    capsys.readouterr()
    runpy.run_path("show.py")
    shown = capsys.readouterr().out.splitlines()
    promised = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert promised is not None
    kept = promised[1].splitlines()
    silent = shown[: len(shown) - len(kept)]
    assert f"prints {len(silent)} lines" in text and all(line.endswith("+0.00000") for line in silent)
    assert shown[len(silent) :] == kept
