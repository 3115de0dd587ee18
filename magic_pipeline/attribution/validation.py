"""The validation of one experiment, as its file's `validation:` section says: its banks, and what is made from them.

`LDS`, removal curves and metasmoothness are sealed as JSON beside the bank that they were made from, and made again where they are
damaged or where scores or retrainings changed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.attribution.bank import Bank, random_subsets
from magic_pipeline.attribution.bank_plan import sealed_bank_plan
from magic_pipeline.attribution.bank_results import RetrainedRun, base_measurements, retrained_runs
from magic_pipeline.attribution.directional_derivative import derivative_bank, directional_derivative
from magic_pipeline.attribution.experiment_settings import (
    DerivativeSettings,
    LDSSettings,
    RemovalSettings,
    SmoothnessSettings,
)
from magic_pipeline.attribution.linear_datamodeling import linear_datamodeling_score
from magic_pipeline.attribution.metasmoothness import metasmoothness, smoothness_bank
from magic_pipeline.attribution.observing import Observe, ShouldStop, never, unobserved
from magic_pipeline.attribution.opening import OpenExperiment
from magic_pipeline.attribution.removal_curves import Scores, removal_bank, removal_curves
from magic_pipeline.attribution.retraining import OpenBank, open_bank, retrain
from magic_pipeline.attribution.scores import read_matrix
from magic_pipeline.attribution.sealed_files import SealedFile, find_file, seal_file
from magic_pipeline.attribution.status import QueryStatus, query_statuses
from magic_pipeline.attribution.trajectory import sealed_trajectory
from magic_pipeline.checkpoints.digests import fingerprint
from magic_pipeline.checkpoints.lease import live_holder
from magic_pipeline.errors import InputError, MagicError


@dataclass(frozen=True)
class Report:
    """A sealed report: `digest` is the data version, `content` plain data (NaN as None), `paths` where it lies."""

    digest: str
    content: Any
    paths: tuple[str, ...]
    found: bool


def subset_banks(opened: OpenExperiment) -> tuple[Bank, ...]:
    """One bank for each drop fraction.

    Raises:
        InputError: the experiment file has no validation.lds section, or it asks for impossible subsets.
    """
    settings = _lds(opened)
    return tuple(
        random_subsets(
            opened.weighted,
            len(opened.units),
            fraction=fraction,
            subsets=settings.subsets,
            seed=settings.seed,
        )
        for fraction in settings.drop_fraction
    )


def retrain_subsets(
    opened: OpenExperiment,
    labels: Sequence[str] | None = None,
    *,
    observe: Observe = unobserved,
    should_stop: ShouldStop = never,
) -> None:
    """Makes the retrainings of these labels (default: all), of all drop fractions. Raises as `retrain`."""
    for bank in subset_banks(opened):
        wanted = [label for label in bank.labels if labels is None or label in labels]
        if wanted:
            of = open_bank(opened, bank, keep_models=_lds(opened).keep_models)
            retrain(of, wanted, observe=observe, should_stop=should_stop)


def finished_subsets(opened: OpenExperiment) -> dict[str, RetrainedRun]:
    """Label -> finished retraining, from the store alone: nothing is planned or trained."""
    return {run.label: run for of in _begun(opened) for run in retrained_runs(of)}


def lds_digest(opened: OpenExperiment) -> str | None:
    """The data version that a table made now has; None while there is no retraining or no finished query."""
    runs = {of.bank.fingerprint: retrained_runs(of) for of in _begun(opened)}
    queries = _finished(opened)
    if not queries or not any(runs.values()):
        return None
    return fingerprint({"lds": [_made_from(bank, found, queries) for bank, found in runs.items()]})


def write_lds(opened: OpenExperiment) -> Report:
    """The tables of all drop fractions, written unless they are there already.

    Raises:
        MagicError: no retraining or no query's scores are finished.
    """
    digest = lds_digest(opened)
    if digest is None:
        raise MagicError("there is nothing to compare: materialize retrained_subsets and attribution_scores first")
    queries, base, tables, paths, found = _finished(opened), dict[str, float](), [], [], True
    matrix = read_matrix(opened, [query.key for query in queries])
    ids, begun = {query.key: query.id for query in queries}, {of.bank.fingerprint: of for of in _begun(opened)}
    for bank in subset_banks(opened):
        of = begun.get(bank.fingerprint)
        if of is None:  # said, not left out: none of its subsets is there
            nothing = linear_datamodeling_score(bank, [], base={}, scores=matrix.scores, queries=ids)
            tables.append(_without_nan(nothing.as_dict()))
            continue
        runs = retrained_runs(of)
        name = "lds." + fingerprint(_made_from(of.bank.fingerprint, runs, queries))[:16]
        base = base or base_measurements(of)

        def make(of: OpenBank = of, runs: Sequence[RetrainedRun] = runs, base: Mapping[str, float] = base) -> Any:
            results = [run.result for run in runs]
            return linear_datamodeling_score(of.bank, results, base=base, scores=matrix.scores, queries=ids).as_dict()

        sealed, content, was_there = _sealed(of, name, make)
        tables.append(content)
        paths.append(sealed.path)
        found &= was_there
    return Report(digest, tables, tuple(paths), found)


def removal_digest(opened: OpenExperiment) -> str | None:
    """The data version of the removal curves; None while a retraining or all scores are missing."""
    queries = _removed_of(opened)
    if not queries:
        return None
    bank, _ = _removal_bank(opened, queries)
    of = _planned(opened, bank)
    runs = () if of is None else retrained_runs(of)
    complete = len(runs) == len(bank.runs)
    return fingerprint(_made_from(bank.fingerprint, runs, queries)) if complete else None


def write_removal_curves(
    opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> Report:
    """Retrains without the helpful examples of each finished query, and writes the curves. Raises as `retrain`."""
    queries = _removed_of(opened)
    if not queries:
        raise MagicError("no query's scores are finished; materialize attribution_scores first")
    bank, scores = _removal_bank(opened, queries)
    of = open_bank(opened, bank)
    retrain(of, observe=observe, should_stop=should_stop)
    runs = retrained_runs(of)

    def make() -> Any:
        ids = {query.key: query.id for query in queries}
        results = [run.result for run in runs]
        return removal_curves(bank, results, base=base_measurements(of), scores=scores, queries=ids).as_dict()

    digest = fingerprint(_made_from(bank.fingerprint, runs, queries))
    sealed, content, found = _sealed(of, f"removal.{digest[:16]}", make)
    return Report(digest, content, (sealed.path,), found)


def smoothness_digest(opened: OpenExperiment) -> str | None:
    """The data version of metasmoothness; None while a training is missing."""
    settings = opened.experiment.validation.smoothness or SmoothnessSettings()
    of = _planned(opened, smoothness_bank(opened.weighted, len(opened.units), settings), needs_trajectory=False)
    runs = () if of is None else retrained_runs(of)
    return None if of is None or len(runs) < len(of.bank.runs) else _smoothness_version(of, runs)


def write_metasmoothness(
    opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> Report:
    """Metasmoothness of the experiment's training, before or beside everything else. Raises as `retrain`."""
    settings = opened.experiment.validation.smoothness or SmoothnessSettings()
    found = metasmoothness(opened, settings, observe=observe, should_stop=should_stop)
    of = open_bank(opened, smoothness_bank(opened.weighted, len(opened.units), settings), needs_trajectory=False)
    digest = _smoothness_version(of, retrained_runs(of))
    sealed, content, was_there = _sealed(of, f"smoothness.{digest[:16]}", found.as_dict)
    return Report(digest, content, (sealed.path,), was_there)


def derivative_digest(opened: OpenExperiment) -> str | None:
    """The data version of the directional derivative; None while a training or all scores are missing."""
    queries = _finished(opened)
    of = _planned(opened, derivative_bank(opened.weighted, len(opened.units), _derivative(opened)))
    runs = () if of is None else retrained_runs(of)
    if of is None or not queries or len(runs) < len(of.bank.runs):
        return None
    return fingerprint(_made_from(of.bank.fingerprint, runs, queries))


def write_directional_derivative(
    opened: OpenExperiment, *, observe: Observe = unobserved, should_stop: ShouldStop = never
) -> Report:
    """Trains twice with the weights moved along a random direction, and compares with the scores. Raises as `retrain`."""
    settings, queries = _derivative(opened), _finished(opened)
    if not queries:
        raise MagicError("no query's scores are finished; materialize attribution_scores first")
    of = open_bank(opened, derivative_bank(opened.weighted, len(opened.units), settings))
    retrain(of, observe=observe, should_stop=should_stop)
    runs = retrained_runs(of)

    def make() -> Any:
        results, ids = [run.result for run in runs], {query.key: query.id for query in queries}
        scores = read_matrix(opened, list(ids)).scores
        return directional_derivative(of.bank, results, scores=scores, queries=ids, settings=settings).as_dict()

    digest = fingerprint(_made_from(of.bank.fingerprint, runs, queries))
    name = fingerprint({"of": digest, "tolerance": settings.tolerance})
    sealed, content, found = _sealed(of, f"derivative.{name[:16]}", make)
    return Report(digest, content, (sealed.path,), found)


def read_validation(opened: OpenExperiment) -> dict[str, Any]:
    """Everything that the validation section asks for and that is finished, as plain data; what is not there is None."""
    section = opened.experiment.validation
    content: dict[str, Any] = {"experiment": opened.experiment.name, "fingerprint": opened.fingerprint}
    if section.smoothness is not None:
        content["smoothness"] = write_metasmoothness(opened).content if smoothness_digest(opened) else None
    if section.lds is not None:
        content["lds"] = write_lds(opened).content if lds_digest(opened) else None
    if section.removal is not None:
        content["removal"] = write_removal_curves(opened).content if removal_digest(opened) else None
    if section.derivative is not None:
        content["derivative"] = write_directional_derivative(opened).content if derivative_digest(opened) else None
    return content


def held_subsets(opened: OpenExperiment) -> dict[str, dict[str, object]]:
    """Label -> the live process that has its block now, of subsets that are not finished."""
    held: dict[str, dict[str, object]] = {}
    for of in _begun(opened):
        for block in of.blocks:
            chain = of.chain(block)
            holder = live_holder(chain) if chain.completed(of.expect(block)) is None else None
            held |= {} if holder is None else dict.fromkeys(block, holder)
    return held


def _removed_of(opened: OpenExperiment) -> list[QueryStatus]:
    settings = opened.experiment.validation.removal or RemovalSettings()
    return _finished(opened)[: settings.queries]


def _removal_bank(opened: OpenExperiment, queries: Sequence[QueryStatus]) -> tuple[Bank, Scores]:
    settings = opened.experiment.validation.removal or RemovalSettings()
    keys, walks = [query.key for query in queries], [str(query.walk_digest) for query in queries]
    scores = read_matrix(opened, keys).scores
    return removal_bank(opened.weighted, scores, keys, settings, walks), scores


def _smoothness_version(of: OpenBank, runs: Sequence[RetrainedRun]) -> str:
    return fingerprint({"smoothness": of.bank.fingerprint, "models": [run.digest for run in runs]})


def _lds(opened: OpenExperiment) -> LDSSettings:
    settings = opened.experiment.validation.lds
    if settings is None:
        raise InputError(
            "there is nothing to validate with; add for example  validation: {lds: {subsets: 50, drop_fraction: 0.05}}",
            file=opened.experiment.path,
            field="validation.lds",
        )
    return settings


def _derivative(opened: OpenExperiment) -> DerivativeSettings:
    return opened.experiment.validation.derivative or DerivativeSettings()


def _begun(opened: OpenExperiment) -> list[OpenBank]:
    """The banks of random subsets that have a plan, read-only; none while training is not complete."""
    return [of for of in (_planned(opened, bank) for bank in subset_banks(opened)) if of is not None]


def _planned(opened: OpenExperiment, bank: Bank, *, needs_trajectory: bool = True) -> OpenBank | None:
    """The bank if it has been begun: nothing is probed, planned or written."""
    trajectory = sealed_trajectory(opened) if needs_trajectory else None
    plan = sealed_bank_plan(opened.store, opened.layout.bank(bank.fingerprint))
    if plan is None or (needs_trajectory and trajectory is None):
        return None
    return OpenBank(opened, bank, plan, trajectory)


def _finished(opened: OpenExperiment) -> list[QueryStatus]:
    return [query for query in query_statuses(opened) if query.complete]


def _made_from(bank: str, runs: Sequence[RetrainedRun], queries: Sequence[QueryStatus]) -> dict[str, Any]:
    """What decides a report's numbers."""
    results = [[run.digest, sorted(run.result.measurements)] for run in runs]
    return {"bank": bank, "results": results, "columns": [[query.key, query.walk_digest] for query in queries]}


def _sealed(of: OpenBank, name: str, make: Callable[[], Any]) -> tuple[SealedFile, Any, bool]:
    """The report of this name, made and sealed unless it is there whole."""
    store, folder = of.opened.store, of.layout.reports
    found = find_file(store, folder, name)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "report.json"
        if found is not None:
            store.fetch_file(f"{found.folder}/blobs", found.blob, file)
            return found, json.loads(file.read_text(encoding="utf-8")), True
        content = _without_nan(make())
        file.write_text(json.dumps(content, ensure_ascii=False, allow_nan=False), encoding="utf-8")
        facts = {"training": of.opened.fingerprint, "bank": of.bank.fingerprint}
        return seal_file(store, folder, name, file, facts), content, False


def _without_nan(content: Any) -> Any:
    """Plain data with None for what is not finite: JSON has no NaN."""
    if isinstance(content, float):
        return content if abs(content) < float("inf") else None
    if isinstance(content, Mapping):
        return {key: _without_nan(value) for key, value in content.items()}
    return [_without_nan(value) for value in content] if isinstance(content, list | tuple) else content
