#!/usr/bin/env bash
# Ends what start.sh has started: webserver and daemon, then the code server. Runs under way go on, and are found again.
set -euo pipefail

: "${DAGSTER_HOME:?set DAGSTER_HOME as for start.sh}"
for name in webserver daemon code-server; do
  file=$DAGSTER_HOME/$name.pid
  [ -f "$file" ] || continue
  pid=$(cat "$file")
  # A pid is used again after a reboot: only what was started from here is ended.
  if [ -r "/proc/$pid/environ" ] && tr '\0' '\n' <"/proc/$pid/environ" | grep -qxF "DAGSTER_HOME=$DAGSTER_HOME"; then
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
  fi
  rm -f "$file"
done
