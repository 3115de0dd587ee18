"""The crash campaign: a complete small experiment, killed before, during and right after each of its durable operations.

`python -m tests.faults.crashes [--storage local|seaweedfs|moto] [--stride K] [--doubles N] [--seed S]` prints a table. Every run is
a fork; SIGKILL ends it at the n-th operation, another fork resumes. In a double fault the resume is killed too, at an operation
drawn under the seed, and a third one finishes. Afterwards all of this must hold:

* the scores have the bits of an undisturbed run;
* nothing that was sealed is executed again: by the ledger, training goes on from the highest sealed step and each query from its
  lowest (names alone say so, hence what is sealed is known without the program's own judgement);
* a kill costs training and each query at most one segment that is begun again; on S3, where a save runs beside the next segment, at
  most two (the one that was being saved, and the one that was being computed);
* `verify` finds nothing damaged, and names what the killed process left: its heartbeat, what was unfinished outside the chains of
  checkpoints, score files without a manifest, and blobs of a finished walk whose removal was killed. The chains themselves are
  clean. After `gc` the storage holds as many objects of each name as after an undisturbed run (ledger and epochs aside).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magic_pipeline.attribution.collecting import collect
from magic_pipeline.attribution.verifying import verify_experiment
from tests.faults import inspecting
from tests.faults.forks import import_here, in_a_process, in_parallel, quick_folder, with_its_imports
from tests.faults.struck_sink import Operation, Strike, install
from tests.faults.tables import Try, table
from tests.faults.whole_run import Place, open_at, place, whole_run


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nothing disturbs makes, and in which durable operations."""

    scores: dict[str, str]
    census: dict[str, int]
    operations: tuple[Operation, ...]

    def strikes(self, stride: int) -> Iterator[Strike]:
        """At every moment of every stride-th operation."""
        for n in range(0, len(self.operations), stride):
            for moment in self.operations[n].moments:
                yield Strike(n, moment)


class Victim:
    """An experiment in a storage of its own, run in one fork after the other."""

    def __init__(self, folder: Path, storage: dict[str, Any]) -> None:
        self.folder, self.storage = folder, storage
        self.looks: list[inspecting.Found] = []
        self.struck: list[str] = []
        folder.mkdir(parents=True)

    def run(self, strike: Strike | None = None) -> tuple[int, dict[str, Any] | None]:
        """(wait status, what is found afterwards) of one run. What it found at its beginning joins `looks` in any case.

        What a run imports is imported here when it has ended.
        """
        look, struck = self.folder / "look.json", self.folder / "struck"

        def die(operation: Operation) -> None:
            struck.write_text(f"{operation.verb} {inspecting.named(operation.path)}", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

        def work() -> dict[str, Any]:
            opened = open_at(self.folder, self.storage)
            look.write_text(json.dumps(vars(inspecting.look(opened))), encoding="utf-8")
            operations = install(strike, die)
            opened = open_at(self.folder, self.storage)
            whole_run(opened)
            return {
                "operations": [asdict(one) for one in operations.made],
                "look": vars(inspecting.look(opened)),
                "scores": inspecting.score_bits(opened),
                "verify": [(one.object, one.problem) for one in verify_experiment(opened).findings],
                "census": inspecting.census(opened),
            }

        status, result = in_a_process(with_its_imports(work), self.folder / "log.txt")
        found, modules = result or (None, [])
        import_here(modules)
        self.looks.append(inspecting.Found(**json.loads(look.read_text(encoding="utf-8"))))
        if struck.exists():
            self.struck.append(struck.read_text(encoding="utf-8"))
            struck.unlink()
        return status, found

    def collect(self) -> dict[str, int]:
        """What is stored after `gc`."""

        def work() -> dict[str, int]:
            opened = open_at(self.folder, self.storage)
            collect(opened.experiment, free=True, older_than=0)
            return inspecting.census(opened)

        _, census = in_a_process(work, self.folder / "log.txt")
        return dict(census)


def undisturbed(folder: Path, where: Place) -> Undisturbed:
    """Raises RuntimeError with its output where it fails."""
    status, found = Victim(folder, where.new()).run()
    if found is None:
        raise RuntimeError(f"the undisturbed run ended with {status}: {(folder / 'log.txt').read_text()}")
    operations = tuple(Operation(**one) for one in found["operations"])
    return Undisturbed(found["scores"], found["census"], operations)


def attempt(folder: Path, where: Place, strikes: tuple[Strike, ...], reference: Undisturbed) -> tuple[Try, int]:
    """A try with these kills, and how many durable operations the run that finished it made."""
    began, victim, problems = time.monotonic(), Victim(folder, where.new()), list[str]()
    for strike in strikes:
        status, _ = victim.run(strike)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            problems.append(f"the run to be killed ended with {status}")
    status, found = victim.run()
    if found is not None and found["census"] != reference.census:
        found["census"] = victim.collect()
    if found is None:
        problems.append(f"the rerun ended with {status}: {(folder / 'log.txt').read_text()[-2000:]}")
    else:
        victim.looks.append(inspecting.Found(**found["look"]))
        problems += judge(victim, found, reference, len(strikes) * (2 if where.saves_beside else 1))
    moments = ", then ".join(f"{s.moment} {what}" for s, what in zip(strikes, victim.struck, strict=False))
    fault = f"SIGKILL {moments} (operations {', '.join(str(strike.n) for strike in strikes)})"
    made = 0 if found is None else len(found["operations"])
    return Try(_kind(where, strikes, reference), fault, tuple(problems), time.monotonic() - began), made


def judge(victim: Victim, found: dict[str, Any], reference: Undisturbed, most: int) -> list[str]:
    """What is wrong after the last rerun; `most` segments of each kind of work may have been begun again."""
    looks, struck = victim.looks, victim.struck
    wrong = [] if found["scores"] == reference.scores else ["the scores are not those of an undisturbed run"]
    for before, after in itertools.pairwise(looks):
        wrong += inspecting.repeated_work(before, after)
    again = inspecting.begun_again(looks[-1].ledger)
    wrong += [f"{count} segments of {work} were begun again" for work, count in again.items() if count > most]
    wrong += [f"{name}: {problem}" for name, problem in found["verify"] if not _may_be_left(name, problem, struck)]
    if found["census"] != reference.census:
        names = sorted(found["census"].keys() | reference.census.keys())
        counts = [(name, reference.census.get(name, 0), found["census"].get(name, 0)) for name in names]
        wrong += [
            f"after gc, {name}: {there} in place of {expected}" for name, expected, there in counts if expected != there
        ]
    return wrong


def _may_be_left(name: str, problem: str, struck: Sequence[str]) -> bool:
    """Whether `verify` may name this until `gc` frees it: what lies in no chain, or of a removal that was killed."""
    in_chain = re.search(r"/(trajectory|queries/[^/]+/[^/]+)/(blobs|manifests)/", name)
    return problem.startswith("orphaned") and (not in_chain or any(what.startswith("delete") for what in struck))


def _kind(where: Place, strikes: tuple[Strike, ...], reference: Undisturbed) -> str:
    if len(strikes) > 1:
        return f"{where.name}: SIGKILL, and SIGKILL of the resume"
    [strike] = strikes
    what = {"publish": "a publication", "delete": "a deletion", "discard": "a clean-up"}
    moment = {"before": "before", "during": "in the middle of", "after": "right after"}[strike.moment]
    return f"{where.name}: SIGKILL {moment} {what[reference.operations[strike.n].verb]}"


def campaign(where: Place, folder: Path, *, stride: int, doubles: int, seed: int, jobs: int) -> list[Try]:
    """All tries on one kind of storage, each told as it ends."""
    chosen = random.Random(f"{seed}/{where.name}")
    reference = undisturbed(folder / "undisturbed", where)
    print(f"{where.name}: an undisturbed run makes {len(reference.operations)} durable operations", flush=True)

    def make(strikes: Sequence[tuple[Strike, ...]]) -> list[tuple[Try, int]]:
        numbered = enumerate(strikes, len(list(folder.iterdir())))
        tries = [functools.partial(_told, folder / str(number), where, these, reference) for number, these in numbered]
        return [(Try(**one | {"problems": tuple(one["problems"])}), made) for one, made in in_parallel(jobs, tries)]

    strikes = list(reference.strikes(stride))
    singles = make([(strike,) for strike in strikes])
    resumes = [(strike, operations) for strike, (_, operations) in zip(strikes, singles, strict=True) if operations]
    again = make(
        [
            # The resume's operations are those of the same resume that was not killed.
            (first, Strike(chosen.randrange(operations), chosen.choice(("before", "after"))))
            for first, operations in chosen.sample(resumes, min(doubles, len(resumes)))
        ]
    )
    return [one for one, _ in singles + again]


def _told(
    folder: Path, where: Place, strikes: tuple[Strike, ...], reference: Undisturbed
) -> tuple[dict[str, Any], int]:
    one, made = attempt(folder, where, strikes, reference)
    print(one, flush=True)
    if not one.problems:
        shutil.rmtree(folder)
        folder.mkdir()
    return asdict(one), made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", choices=("local", "seaweedfs", "moto"), default="local")
    parser.add_argument("--stride", type=int, default=1, help="only every K-th operation (1)")
    parser.add_argument("--doubles", type=int, default=40, help="double faults (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tries at a time (one a CPU)")
    options = parser.parse_args(arguments)
    with quick_folder() as folder, place(options.storage, folder / "server") as where:
        tries = campaign(
            where,
            folder / "tries",
            stride=options.stride,
            doubles=options.doubles,
            seed=options.seed,
            jobs=options.jobs,
        )
    print(table(tries))
    return 1 if any(one.problems for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
