#!/usr/bin/env bash
# Starts what does not run of code server, daemon and webserver: processes of their own, on loopback. Call it again at any time,
# from cron for example: what runs is left alone. Environment: see environment.example. Stop: stop.sh
set -euo pipefail

: "${DAGSTER_HOME:?set DAGSTER_HOME: where Dagster keeps its books}"
: "${MAGIC_PIPELINE_EXPERIMENTS:?set MAGIC_PIPELINE_EXPERIMENTS: the folder of experiment files}"
port=${MAGIC_PORT:-3000} code_port=${MAGIC_CODE_PORT:-4000} python=${MAGIC_PYTHON:-python}
export DAGSTER_HOME MAGIC_PIPELINE_EXPERIMENTS DAGSTER_DISABLE_TELEMETRY=yes
mkdir -p "$DAGSTER_HOME"
exec 9>"$DAGSTER_HOME/start.lock.tmp"
flock 9 # two callers would start everything twice

runs() { # name: whether its process lives; a pid is used again after a reboot, so it has to be one of this home
  local pid
  pid=$(cat "$DAGSTER_HOME/$1.pid" 2>/dev/null) || return 1
  { tr '\0' '\n' <"/proc/$pid/environ" | grep -qxF "DAGSTER_HOME=$DAGSTER_HOME"; } 2>/dev/null
}

new=() ports=()
for name in code-server daemon webserver; do runs "$name" || new+=("$name"); done
[ ${#new[@]} -gt 0 ] || { echo "everything runs: http://127.0.0.1:$port"; exit 0; }
for name in "${new[@]}"; do
  case $name in code-server) ports+=("$code_port") ;; webserver) ports+=("$port") ;; esac
done
"$python" - "$DAGSTER_HOME" "${ports[@]}" <<'PYTHON'
import pathlib, socket, sys
from dagster import DagsterInstance
from magic_pipeline.orchestration.instance import prepare_home
home, *ports = sys.argv[1:]
for port in map(int, ports):
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))  # two code servers would share a port without a word
        except OSError as error:
            sys.exit(f"port {port} of 127.0.0.1 is taken: {error.strerror}")
prepare_home(pathlib.Path(home))
# Here and once: three processes that make the tables of a new home at the same time get in each other's way.
DagsterInstance.from_config(home).dispose()
PYTHON
cat >"$DAGSTER_HOME/workspace.yaml" <<YAML
load_from:
  - grpc_server: {host: 127.0.0.1, port: $code_port, location_name: magic_pipeline.definitions}
YAML

start() { # name, command ...: in a session of its own; its log and its pid lie in DAGSTER_HOME
  local name=$1
  shift
  [[ " ${new[*]} " == *" $name "* ]] || return 0
  # Shells start what is in the background with SIGINT ignored, and Dagster then ignores SIGTERM too.
  setsid "$python" -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.execvp(sys.argv[1], sys.argv[1:])' \
    "$@" >>"$DAGSTER_HOME/$name.log" 2>&1 </dev/null 9>&- &
  echo $! >"$DAGSTER_HOME/$name.pid"
}

cd "$DAGSTER_HOME"
start code-server "$python" -m dagster api grpc -m magic_pipeline.definitions -h 127.0.0.1 -p "$code_port"
start daemon "$python" -m dagster._daemon run -w "$DAGSTER_HOME/workspace.yaml"
start webserver "$python" -m dagster_webserver -h 127.0.0.1 -p "$port" -w "$DAGSTER_HOME/workspace.yaml"
echo "started: ${new[*]}. http://127.0.0.1:$port in a moment; logs and pids are in $DAGSTER_HOME"
