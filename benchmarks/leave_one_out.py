"""Do the scores predict retraining? Leaves out the most influential and as many random examples of a query, one at a time.

    python benchmarks/leave_one_out.py experiments/digits.yaml [--query ID] [--count 10]

Needs a finished run of the experiment. Prints predicted and actual changes of the query's measurement and their correlations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magic_pipeline.attribution.experiment import load_experiment
from magic_pipeline.attribution.leave_one_out import influential_and_random, leave_one_out
from magic_pipeline.attribution.opening import open_experiment
from magic_pipeline.attribution.queries import partition_key
from magic_pipeline.attribution.scores import read_scores
from magic_pipeline.errors import InputError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--query", help="the query's id; default: the first")
    parser.add_argument("--count", type=int, default=10, help="influential examples, and as many random ones")
    options = parser.parse_args()
    try:
        opened = open_experiment(load_experiment(options.experiment))
        key = opened.queries[0].key if options.query is None else partition_key(options.query)
        table = read_scores(opened, key)
        scores = [float(score) for score in table.scores]
        rows = influential_and_random(scores, options.count)
        result = leave_one_out(opened, key, scores, rows, observe=_progress)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"query {result.query}: leaving out one example changes its loss by")
    print(f"{'example':<32}{'predicted':>14}{'retrained':>14}")
    for number, row in enumerate(result.rows):
        if number == options.count:
            print("  and of random ones:")
        print(f"{row.unit[:31]:<32}{row.predicted:>14.6f}{row.actual:>14.6f}")
    print(f"Pearson {result.pearson:.4f}, Spearman {result.spearman:.4f} over {len(result.rows)} retrainings")
    return 0


def _progress(done: int, of: int) -> None:
    print(f"\rretrained {done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
