#!/usr/bin/env bash
# One block of queries as a batch job:   sbatch deploy/slurm/job.sh experiments/my.yaml
# Ten blocks side by side:               sbatch --array=0-9 deploy/slurm/job.sh experiments/my.yaml queries.jsonl
#SBATCH --job-name=magic-pipeline
#SBATCH --cpus-per-task=8
#SBATCH --gpus=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to this shell five minutes before the end, or at a preemption: time to seal the step that is under way.
#SBATCH --signal=B:TERM@300
set -uo pipefail

experiment=${1:?usage: job.sh EXPERIMENT.yaml [QUERIES.jsonl]}
arguments=("$experiment")
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] && [ -n "${2:-}" ]; then
  # Every n-th query, so that blocks are of one size.
  mapfile -d '' -t ids < <(python - "$2" "$SLURM_ARRAY_TASK_ID" "${SLURM_ARRAY_TASK_COUNT:-1}" <<'PYTHON'
import json, sys
file, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
lines = [line for line in open(file, encoding="utf-8") if line.strip()]
print("".join(json.loads(line)["id"] + "\0" for line in lines[number::count]), end="")
PYTHON
  )
  [ "${#ids[@]}" -gt 0 ] || { echo "there are fewer queries than tasks: nothing to do"; exit 0; }
  arguments+=(--queries "${ids[@]}")
fi

stopped=
# Two Dagster homes must not share one SQLite file over a network file system: this one is the job's own.
export DAGSTER_HOME=${DAGSTER_HOME:-${TMPDIR:-/tmp}/magic-dagster-${SLURM_JOB_ID:-$$}}
mkdir -p "$DAGSTER_HOME"
magic-pipeline run "${arguments[@]}" &
child=$!
trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM INT
while :; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break # a signal ends `wait` before the child has ended
done
# 75 is for slurm.conf's RequeueExit=75: the job is queued again, and goes on from what it has sealed.
[ -z "$stopped" ] || [ "$code" -eq 0 ] || code=75
exit "$code"
