"""The command line: `magic-pipeline run|validate|plan|status|export|verify|gc|delete|list|ui`, a thin edge over the rooms below.

Exit codes: 0 done; 2 the input is wrong (one line on stderr); 1 anything else. What a script reads goes to stdout,
all else to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from magic_pipeline.attribution.experiment import Experiment, load_experiments
from magic_pipeline.errors import HeldError, InputError, MagicError

if TYPE_CHECKING:
    from magic_pipeline.attribution.collecting import Collection
    from magic_pipeline.attribution.opening import OpenExperiment
    from magic_pipeline.attribution.status import StoredExperiment
    from magic_pipeline.attribution.verifying import Verification
    from magic_pipeline.orchestration.running import Outcome

DONE, FAILED, WRONG_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    _log_to_stderr()
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except InputError as error:
        return _complain(error, WRONG_INPUT, options.debug)
    except HeldError as error:
        print(f"{error} Nothing was done.", file=sys.stderr)
        return DONE
    except KeyboardInterrupt as error:
        return _complain(MagicError("interrupted"), FAILED, options.debug, error)
    except BrokenPipeError:
        # The reader of our output has gone, for example `| head`; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 - the last place where one line can be made of it
        return _complain(error, getattr(error, "exit_code", FAILED), options.debug)


def _complain(error: BaseException, code: int, debug: bool, cause: BaseException | None = None) -> int:
    if debug:
        traceback.print_exception(cause or error)
    line = " ".join(str(error).split())
    shown = line if isinstance(error, MagicError) and line else f"{type(error).__name__}: {line}"
    print(f"magic-pipeline: {shown}", file=sys.stderr)
    return code


def run(options: argparse.Namespace) -> int:
    """Train, walk and score what is not finished."""
    from magic_pipeline.orchestration.instance import open_instance
    from magic_pipeline.orchestration.interrupts import listen_to_interrupts
    from magic_pipeline.orchestration.running import run_experiment

    experiment = _experiment(options.experiment)
    listen_to_interrupts()
    with open_instance(experiment.folder) as instance:
        outcome = run_experiment(instance, experiment, options.queries)
    _tell_outcome(experiment, outcome, options)
    return DONE


def _tell_held(outcome: Outcome) -> None:
    for what, holder in outcome.held.items():
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        run_id = f", run {holder['run_id']}" if holder.get("run_id") else ""
        print(f"{what} is being worked on by {who}{run_id}; it was left to it", file=sys.stderr)


def _tell_outcome(experiment: Experiment, outcome: Outcome, options: argparse.Namespace) -> None:
    _tell_held(outcome)
    if options.json:
        runs = [{"asset": asset, "partitions": count, "run_id": run_id} for asset, count, run_id in outcome.runs]
        held = {what: dict(holder) for what, holder in outcome.held.items()}
        _print_json({"runs": runs, "held": held, "marked_as_failed": outcome.marked, **_stored_json(experiment)})
        return
    if not outcome.runs and not outcome.held:
        print("everything is finished already; nothing was run")
    _print_scores(experiment, options)
    print(f"\nLook at it in Dagster: magic-pipeline ui {options.experiment}")


def _print_scores(experiment: Experiment, options: argparse.Namespace) -> None:
    from magic_pipeline.attribution.status import query_statuses
    from magic_pipeline.orchestration.operating import opened_once
    from magic_pipeline.orchestration.score_metadata import terminal_report

    opened = opened_once(experiment)
    chosen = None if options.queries is None else set(options.queries)
    statuses = [status for status in query_statuses(opened) if chosen is None or status.id in chosen]
    for status in [status for status in statuses if status.scores_digest is not None][: options.show]:
        print(f"\n{terminal_report(opened, status.key)}")
    finished = sum(status.scores_digest is not None for status in statuses)
    print(
        f"\n{finished} of {len(statuses)} queries have scores; export them: magic-pipeline export {options.experiment}"
    )


def plan(options: argparse.Namespace) -> int:
    """Say what a run will do and cost."""
    from magic_pipeline.attribution.opening import open_experiment
    from magic_pipeline.attribution.planning import plan_experiment

    found = plan_experiment(open_experiment(_experiment(options.experiment)))
    _print_json(found.as_dict()) if options.json else print("\n".join(found.lines()))
    return DONE


def validate(options: argparse.Namespace) -> int:
    """Run what is not finished, retrain as the validation section says, and print how well the scores predict it."""
    from magic_pipeline.attribution.validation import read_validation
    from magic_pipeline.attribution.validation_tables import validation_lines
    from magic_pipeline.orchestration.instance import open_instance
    from magic_pipeline.orchestration.interrupts import listen_to_interrupts
    from magic_pipeline.orchestration.operating import opened_once
    from magic_pipeline.orchestration.running import run_experiment

    experiment = _experiment(options.experiment)
    experiment.require_validation()
    listen_to_interrupts()
    with open_instance(experiment.folder) as instance:
        outcome = run_experiment(instance, experiment)
    _tell_held(outcome)
    content = read_validation(opened_once(experiment))
    _print_json(content) if options.json else print("\n".join(validation_lines(content)))
    return DONE


def status(options: argparse.Namespace) -> int:
    """Say how far everything is, from the store alone; and what Dagster's event log says, where there is an
    instance."""
    experiment = _experiment(options.experiment)
    content = _stored_json(experiment)
    view = _event_log_view(experiment)
    if view is not None:
        content["dagster"] = view
    if options.json:
        _print_json(content)
        return DONE
    print("\n".join(_status_lines(content)))
    return DONE


def _stored_json(experiment: Experiment) -> dict[str, Any]:
    from magic_pipeline.attribution.status import stored_status

    stored = stored_status(experiment)
    return {
        "experiment": experiment.name,
        "storage": experiment.storage_url,
        "stored": [_without_none_holders(one) for one in stored],
    }


def _without_none_holders(stored: StoredExperiment) -> dict[str, Any]:
    return asdict(stored) | {"holders": {name: dict(holder) for name, holder in stored.holders.items()}}


def _event_log_view(experiment: Experiment) -> dict[str, Any] | None:
    from magic_pipeline.attribution.status import stored_status
    from magic_pipeline.orchestration.event_log_view import view_event_log
    from magic_pipeline.orchestration.instance import existing_instance

    with existing_instance(experiment.folder) as instance:
        if instance is None:
            return None
        stored = stored_status(experiment)
        return view_event_log(instance, experiment, stored[0] if stored else None).as_dict()


def _status_lines(content: dict[str, Any]) -> list[str]:
    lines = [f"{content['experiment']} in {content['storage']}"]
    if not content["stored"]:
        lines.append("  nothing is stored yet")
    for stored in content["stored"]:
        trajectory = stored["trajectory"]
        lines.append(f"  training {stored['fingerprint'][:12]}: {_done(trajectory)}, {trajectory['steps']} steps")
        for query in stored["queries"]:
            scores = ", scores written" if query["scores_digest"] else ""
            lines.append(f"    query {query['id']!r}: {_done(query)}{scores}")
        lines += [f"    {name} is held by process {h['pid']} on {h['host']}" for name, h in stored["holders"].items()]
    dagster = content.get("dagster")
    if dagster is not None:
        counts = ", ".join(f"{name} {count}" for name, count in dagster["materialized"].items())
        lines.append(f"  in Dagster: {counts}; {len(dagster['unfinished_runs'])} unfinished runs")
        lines += [f"    {line}" for line in dagster["differences"]]
        if dagster["differences"]:
            lines.append("    a run repairs these")
    return lines


def _done(part: dict[str, Any]) -> str:
    return "finished" if part["complete"] else f"{part['sealed']} of {part['segments'] or '?'} segments sealed"


def export(options: argparse.Namespace) -> int:
    """Write the scores of all finished queries to one file."""
    from magic_pipeline.attribution.exporting import export_scores
    from magic_pipeline.attribution.opening import open_experiment

    experiment = _experiment(options.experiment)
    output = options.output or Path(f"{experiment.name}_scores.{options.format}")
    opened = open_experiment(experiment)
    if options.format == "png":
        return _export_picture(opened, output, options)
    rows = export_scores(opened, format=options.format, output=output)
    if options.json:
        _print_json({"file": str(output), "format": options.format, "rows": rows})
    else:
        print(f"{rows} rows written to {output}")
    return DONE


def _export_picture(opened: OpenExperiment, output: Path, options: argparse.Namespace) -> int:
    """A gallery of all finished queries with their top examples."""
    from magic_pipeline.attribution.status import query_statuses
    from magic_pipeline.reporting.of_experiment import experiment_gallery

    keys = [status.key for status in query_statuses(opened) if status.scores_digest is not None]
    if not keys:
        raise InputError("there are no finished queries to draw; run it first", field="queries")
    try:
        output.write_bytes(experiment_gallery(opened, keys))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=output, field="output") from error
    if options.json:
        _print_json({"file": str(output), "format": "png", "queries": len(keys)})
    else:
        print(f"a picture of {len(keys)} queries written to {output}")
    return DONE


def report(options: argparse.Namespace) -> int:
    """Write one HTML page: training, the queries with their top examples, validation, and what it all has cost."""
    from magic_pipeline.attribution.opening import open_experiment
    from magic_pipeline.orchestration.instance import existing_instance
    from magic_pipeline.orchestration.run_costs import run_costs
    from magic_pipeline.reporting.html_report import html_report

    experiment = _experiment(options.experiment)
    output = options.output or Path(f"{experiment.name}_report.html")
    if not output.parent.is_dir() or output.is_dir():
        raise InputError("should be a file in a folder that exists", file=output, field="output")
    with existing_instance(experiment.folder) as instance:
        runs = [] if instance is None else run_costs(instance, experiment)
    page = html_report(open_experiment(experiment), ids=options.queries, count=options.count, runs=runs)
    output.write_text(page, encoding="utf-8")
    _print_json({"file": str(output), "bytes": len(page)}) if options.json else print(f"report written to {output}")
    return DONE


def compare(options: argparse.Namespace) -> int:
    """Correlate the scores of all finished queries with those of another tool, by query and unit ids."""
    from magic_pipeline.attribution.comparing import compare, read_foreign_scores
    from magic_pipeline.attribution.loading_scores import load_scores

    other = read_foreign_scores(options.file)
    found = compare(load_scores(options.experiment), other)
    _print_json(found.as_dict()) if options.json else print("\n".join(found.lines()))
    return DONE


def verify(options: argparse.Namespace) -> int:
    """Read everything that is stored back and check every digest; exit code 1 where something is damaged or foreign."""
    from magic_pipeline.attribution.verifying import verify_stored

    experiment = _stored_experiment(options.experiment)
    found = verify_stored(experiment, tell=_tell)
    _print_found(experiment, found, options.json)
    # What a killed writer left over is no damage: nothing reads it.
    return FAILED if any(finding.kind != "orphaned" for finding in found.findings) else DONE


def gc(options: argparse.Namespace) -> int:
    """Say what nobody needs any more in the storage, and with --yes free it."""
    from magic_pipeline.attribution.collecting import collect
    from magic_pipeline.orchestration.instance import existing_instance
    from magic_pipeline.orchestration.records import tell_of_collection

    experiment = _stored_experiment(options.experiment)
    found = collect(
        experiment,
        free=options.yes,
        older_than=options.older_than * 3600,
        trajectories=options.trajectory,
        tell=_tell,
    )
    with existing_instance(experiment.folder) as instance:
        if instance is not None:
            tell_of_collection(instance, experiment.name, found)
    _print_found(experiment, found, options.json)
    return DONE


def delete(options: argparse.Namespace) -> int:
    """Say what the experiment has in its storage, and with --yes remove it."""
    from magic_pipeline.attribution import deleting
    from magic_pipeline.orchestration.instance import existing_instance
    from magic_pipeline.orchestration.records import forget, records_of

    experiment = _stored_experiment(options.experiment)
    _refuse_shared_folder(options.experiment, experiment)
    found = deleting.delete(experiment, fingerprint=options.fingerprint, really=options.yes, tell=_tell)
    known = None
    with existing_instance(experiment.folder) as instance:
        if instance is not None and options.fingerprint is None:
            known = (forget if options.yes else records_of)(instance, experiment.name)
    if options.json:
        _print_json({"experiment": experiment.name, **found.as_dict(), "dagster": known and asdict(known)})
    else:
        print("\n".join([*found.lines(), *([known.line(options.yes)] if known is not None else [])]))
    return DONE


def _print_found(experiment: Experiment, found: Verification | Collection, as_json: bool) -> None:
    if as_json:
        _print_json({"experiment": experiment.name, **found.as_dict()})
    else:
        print("\n".join(found.lines()))


def _tell(line: str) -> None:
    """Progress, for a person who waits."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _stored_experiment(path: Path) -> Experiment:
    """The experiment as far as its storage is concerned: its task, its data and its settings may be wrong or gone."""
    from magic_pipeline.attribution.inventory import storage_of

    try:
        return _experiment(path)
    except InputError as error:
        return storage_of(path, error)


def _refuse_shared_folder(path: Path, experiment: Experiment) -> None:
    place = (experiment.storage_url, experiment.storage_folder)
    for other, found in load_experiments(path.parent).items():
        if other != path and isinstance(found, Experiment) and (found.storage_url, found.storage_folder) == place:
            raise InputError(f"{other} keeps its results in the same folder of the storage", file=path, field="name")


def list_experiments(options: argparse.Namespace) -> int:
    """List the experiments of a folder with their state, or what is wrong with their file."""
    content = []
    for path, found in load_experiments(options.folder).items():
        if isinstance(found, InputError):
            content.append({"file": str(path), "error": str(found)})
        else:
            content.append({"file": str(path), "experiment": found.name, **_summary(found)})
    if options.json:
        _print_json(content)
        return DONE
    for entry in content:
        print(entry["error"] if "error" in entry else f"{entry['file']}: {entry['experiment']}, {entry['state']}")
    if not content:
        print(f"there is no experiment file in {options.folder}", file=sys.stderr)
    return DONE


def _summary(experiment: Experiment) -> dict[str, Any]:
    from magic_pipeline.attribution.status import stored_status

    try:
        stored = stored_status(experiment)
    except (MagicError, OSError) as error:
        return {"state": f"its storage cannot be read: {error}"}
    if not stored:
        return {"state": "not started"}
    newest = stored[0]
    finished = sum(query.complete for query in newest.queries)
    training = "trained" if newest.trajectory.complete else "in training"
    return {
        "state": f"{training}, {finished} of {len(newest.queries)} queries walked",
        "trained": newest.trajectory.complete,
        "queries": len(newest.queries),
        "queries_finished": finished,
    }


def ui(options: argparse.Namespace) -> int:
    """Open Dagster's UI on the experiments of a folder."""
    from magic_pipeline.orchestration.serving import serve_ui

    target = Path(options.target)
    if not target.exists():
        raise InputError("there is no such experiment file or folder", file=target)
    serve_ui(target if target.is_dir() else target.absolute().parent, options.port)


def _experiment(path: Path) -> Experiment:
    """The experiment of a file, as Dagster will load it with its neighbours.

    Raises:
        InputError: the file is wrong, or another file of its folder has the same name.
    """
    from magic_pipeline.attribution.experiment import load_experiment

    experiment = load_experiment(path)
    found = load_experiments(path.parent).get(path)
    if isinstance(found, InputError):
        raise found
    if found is None:
        raise InputError("an experiment file ends in .yaml or .yml and does not begin with a dot", file=path)
    return experiment


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False, default=str))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    project = logging.getLogger("magic_pipeline")
    project.handlers[:] = [handler]
    project.setLevel(logging.INFO)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of hours, 0 or more, found {text!r}")
    return hours


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="magic-pipeline", description="Which training examples made the model do this?")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)

    def add(name: str, function: Any, *, experiment: bool = True, readable: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(command=function)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        if experiment:
            command.add_argument("experiment", type=Path, metavar="EXPERIMENT.yaml")
        if readable:
            command.add_argument("--json", action="store_true", help="print JSON to stdout")
        return command

    running = add("run", run)
    running.add_argument("--queries", nargs="+", metavar="ID", help="only these queries")
    running.add_argument("--show", type=int, default=3, metavar="N", help="print the tables of the first N queries (3)")
    add("validate", validate)
    add("plan", plan)
    add("status", status)
    exporting = add("export", export)
    exporting.add_argument("--format", choices=("parquet", "arrow", "csv", "npz", "png"), default="parquet")
    exporting.add_argument("--output", type=Path, metavar="FILE", help="default: NAME_scores.FORMAT")
    reporting = add("report", report)
    reporting.add_argument("--output", type=Path, metavar="FILE", help="default: NAME_report.html")
    reporting.add_argument("--queries", nargs="+", metavar="ID", help="only these queries (the first 50)")
    reporting.add_argument("--count", type=int, default=5, metavar="N", help="examples a side of each query (5)")
    comparing = add("compare", compare)
    comparing.add_argument(
        "file", type=Path, metavar="FILE", help="scores of another tool: .parquet, .csv, .arrow or .npz"
    )
    add("verify", verify)
    collecting = add("gc", gc)
    collecting.add_argument("--yes", action="store_true", help="free it; without, it is only listed")
    collecting.add_argument(
        "--older-than", type=_hours, default=24.0, metavar="HOURS", help="what nothing names is left alone so long (24)"
    )
    collecting.add_argument(
        "--trajectory", action="store_true", help="also the sealed states of trajectories whose queries are all walked"
    )
    deletion = add("delete", delete)
    deletion.add_argument("--yes", action="store_true", help="remove it; without, it is only listed")
    deletion.add_argument("--fingerprint", metavar="PREFIX", help="only the training whose fingerprint begins so")
    folder = os.environ.get("MAGIC_PIPELINE_EXPERIMENTS") or "experiments"
    listing = add("list", list_experiments, experiment=False)
    listing.add_argument("folder", type=Path, nargs="?", default=Path(folder), metavar="FOLDER")
    serving = add("ui", ui, experiment=False, readable=False)
    serving.add_argument("target", nargs="?", default=folder, metavar="EXPERIMENT.yaml|FOLDER")
    serving.add_argument("--port", type=int, default=3000)
    return parser


if __name__ == "__main__":
    sys.exit(main())
