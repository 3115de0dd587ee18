"""The corruption campaign: a stored object damaged at random, in every kind of object, in stores stopped at any step or finished.

`python -m tests.faults.corruption [--tries 240] [--seed 0]` prints a table. Each try copies a prepared store, damages one object (two
where they are swapped) and asks, in this order:

* `read_scores` and the matrix, without a rerun: right bits, or an error;
* `verify`: does it name the object? Where it says nothing, the damage has to be harmless;
* a complete rerun: the bits of an undisturbed run, or a clear error that names the object (refused).

Wrong bits without an error are *silent*, and fail the campaign.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from magic_pipeline.attribution.scores import read_matrix, read_scores
from magic_pipeline.attribution.training import train
from magic_pipeline.attribution.verifying import verify_experiment
from magic_pipeline.attribution.walking import walk
from magic_pipeline.errors import InterruptedWalkError, MagicError
from magic_pipeline.metagradient.numerics import exact_numerics
from tests.attribution.running import keys
from tests.faults.whole_run import open_at, whole_run

Scores = dict[str, bytes]
STORAGE = {"storage": "store"}


def flip(chosen: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    file.write_bytes(bytes(content))


def truncate(chosen: random.Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chosen.randrange(len(content))])


def zero(chosen: random.Random, file: Path) -> None:
    content = file.read_bytes()
    start = chosen.randrange(len(content))
    length = min(len(content) - start, chosen.randrange(1, 64))
    file.write_bytes(content[:start] + bytes(length) + content[start + length :])


def empty(chosen: random.Random, file: Path) -> None:
    file.write_bytes(b"")


def remove(chosen: random.Random, file: Path) -> None:
    file.unlink()


def swap(chosen: random.Random, file: Path) -> None:
    """Exchanges the bytes with another object of the same kind; flips a bit where there is none."""
    others = [
        other for other in file.parents[3].rglob(f"*{file.suffix}") if other != file and kind(other) == kind(file)
    ]
    if not others:
        flip(chosen, file)
        return
    other = chosen.choice(sorted(others))
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGE: tuple[Callable[[random.Random, Path], None], ...] = (flip, truncate, zero, empty, remove, swap)


def kind(file: Path) -> str:
    """What an object is: its place without digests, keys and numbers."""
    parts = file.as_posix().partition("/small/")[2].split("/")[1:]
    folder = "/".join(part for part in parts[:-1] if part in ("trajectory", "queries", "scores", "matrix", "ledger"))
    what = {"blobs": "blob", "manifests": "manifest", "epochs": "epoch", "plans": "plan"}.get(
        parts[-2] if len(parts) > 1 else ""
    )
    return f"{folder} {what or (parts[-1] if not folder else 'entry' if folder == 'ledger' else 'completion')}".strip()


@dataclass(frozen=True)
class Outcome:
    """How one try ended: named (verify or the rerun named it), harmless, refused or silent."""

    what: str
    how: str
    outcome: str


def prepared(folder: Path) -> list[Path]:
    """Stores stopped at several steps of the walk, and a finished one."""
    made = []
    for stop in (None, 2, 4, 7, 10):
        place = folder / f"stop-{stop}"
        opened = open_at(place, STORAGE)
        if stop is None:
            whole_run(opened)
        else:
            train(opened)
            asked = iter(range(10**6))
            with contextlib.suppress(InterruptedWalkError):
                walk(opened, keys(opened), should_stop=lambda asked=asked, stop=stop: next(asked) >= stop)  # type: ignore[misc]
        made.append(place)
    return made


def scores_of(place: Path) -> Scores:
    opened = open_at(place, STORAGE)
    whole_run(opened)
    matrix = read_matrix(opened)
    columns = {f"column {i}": matrix.scores[:, i].tobytes() for i in range(matrix.scores.shape[1])}
    return {key: read_scores(opened, key).scores.tobytes() for key in keys(opened)} | columns


def attempt(place: Path, chosen: random.Random, expected: Scores, warnings: list[str]) -> Outcome:
    files = sorted(
        path for path in (place / "store").rglob("*") if path.is_file() and "/writers/" not in path.as_posix()
    )
    what = chosen.choice(sorted({kind(file) for file in files}))
    file = chosen.choice([found for found in files if kind(found) == what])
    damage = chosen.choice(DAMAGE if file.stat().st_size else (remove,))
    damage(chosen, file)
    warnings.clear()
    opened = open_at(place, STORAGE)
    for key in keys(opened):
        try:
            if read_scores(opened, key).scores.tobytes() != expected[key]:
                return Outcome(what, damage.__name__, "silent")
        except (MagicError, OSError):
            pass  # there are no scores yet, or they cannot be read: nobody is misled
    found = [finding for finding in verify_experiment(opened).findings if not finding.problem.startswith("orphaned")]
    try:
        right = scores_of(place) == expected
    except MagicError as error:
        return Outcome(what, damage.__name__, "refused" if file.name in str(error) or found else f"unclear: {error}")
    if not right:
        return Outcome(what, damage.__name__, "silent")
    told = bool(found) or any(file.name in warning for warning in warnings)
    return Outcome(what, damage.__name__, "named" if told else "harmless")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("magic_pipeline")
    logger.addHandler(handler)
    logger.propagate = False
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name, exact_numerics(1):
        folder, chosen = Path(name), random.Random(options.seed)
        stores = prepared(folder)
        expected = scores_of(stores[0])
        for number in range(options.tries):
            place = folder / f"try-{number}"
            shutil.copytree(chosen.choice(stores), place)
            outcomes.append(attempt(place, chosen, expected, warnings))
            shutil.rmtree(place)
    print(table(outcomes))
    return 1 if any(one.outcome == "silent" or one.outcome.startswith("unclear") for one in outcomes) else 0


def table(outcomes: list[Outcome]) -> str:
    columns = ("named", "harmless", "refused", "silent")
    width = max(len(one.what) for one in outcomes)
    lines = [f"{'damaged':{width}}  tries  " + "  ".join(columns)]
    for what in [*sorted({one.what for one in outcomes}), "all"]:
        counted = Counter(one.outcome.partition(":")[0] for one in outcomes if what in (one.what, "all"))
        lines.append(f"{what:{width}}  {counted.total():5}  " + "  ".join(f"{counted[c]:{len(c)}}" for c in columns))
    lines += sorted(
        {f"{one.what}, {one.how}: {one.outcome}" for one in outcomes if one.outcome not in ("named", "refused")}
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
