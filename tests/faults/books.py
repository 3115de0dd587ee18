"""What Dagster's books say of an experiment, held against its store."""

from __future__ import annotations

from pathlib import Path

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.status import stored_status
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.orchestration.event_log_view import view_event_log
from magic_pipeline.orchestration.instance import open_instance


def books(path: Path) -> list[str]:
    """What is wrong in Dagster's books or in the store once everything is finished; nothing where all is well."""
    experiment = load_experiment(path)
    [stored] = stored_status(experiment)
    with open_instance(experiment.folder) as instance:
        view = view_event_log(instance, experiment, stored)
        wrong = [*view.differences, *(f"run {run} is not finished" for run in view.unfinished_runs)]
        queries = len(stored.queries)
        expected = {"training_trajectory": 1, "segment_checkpoints": queries, "attribution_scores": queries}
        if view.materialized != {**expected, "score_matrix": 1}:
            wrong.append(f"materialized: {view.materialized}")
    wrong += [f"{query.key} is not finished" for query in stored.queries if query.scores_digest is None]
    findings = verify_experiment(open_experiment(experiment)).findings
    # A killed writer may leave what nothing names; that takes space and is no fault.
    return wrong + [f"{f.object}: {f.problem}" for f in findings if not f.problem.startswith("orphaned")]
