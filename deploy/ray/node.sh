#!/usr/bin/env bash
# One node of a Ray cluster, in the foreground, so that a service manager can keep it running. Ctrl-C or SIGTERM ends it.
#   node.sh head                                the head; it executes no runs
#   node.sh worker HEAD_ADDRESS:6379            a node that does
# Runs inherit this environment: `set -a; . ./environment; set +a` first, as for deploy/server. What is given after these arguments goes to
# `ray start`: --node-ip-address ADDRESS, --num-gpus N where Ray is not to count them, ...
set -euo pipefail

: "${MAGIC_PIPELINE_EXPERIMENTS:?set MAGIC_PIPELINE_EXPERIMENTS: the folder of experiment files, the same on every node}"
# A canceled walk seals the step that it has reached: as long as a gang's stop_grace_seconds, and a moment.
export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-330}
export RAY_USAGE_STATS_ENABLED=0 DAGSTER_DISABLE_TELEMETRY=yes
python=$(command -v "${MAGIC_PYTHON:-python}") || { echo "MAGIC_PYTHON: there is no program ${MAGIC_PYTHON:-python}" >&2; exit 1; }
export PATH=$(dirname "$python"):$PATH # a run is started by the name `dagster`
ray=("$python" -m ray.scripts.scripts start --block --disable-usage-stats)

case ${1:-} in
  head)
    shift
    exec "${ray[@]}" --head --port="${MAGIC_RAY_PORT:-6379}" --num-cpus=0 --num-gpus=0 --dashboard-host=127.0.0.1 "$@"
    ;;
  worker)
    address=${2:?node.sh worker HEAD_ADDRESS:PORT}
    shift 2
    exec "${ray[@]}" --address="$address" "$@"
    ;;
  *)
    echo "node.sh head | node.sh worker HEAD_ADDRESS:PORT" >&2
    exit 2
    ;;
esac
