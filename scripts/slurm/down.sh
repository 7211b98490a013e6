#!/usr/bin/env bash
# Stop the cluster that up.sh started, and its jobs. REMOVE=1 also removes its folder: logs, accounts, state.
set -uo pipefail
source "$(cd "$(dirname "$0")" && pwd)/cluster.sh"
[ -d "$SLURM_ONE" ] || exit 0
if alive slurmctld; then
  scancel --full --user="$(id -un)" 2>/dev/null
  no_jobs() { [ -z "$(squeue -h)" ]; }
  until_true 30 no_jobs
fi
for daemon in slurmd slurmctld slurmdbd mariadb munged; do
  alive "$daemon" && kill "$(cat "$SLURM_ONE/run/$daemon.pid")"
  gone() { ! alive "$daemon"; }
  until_true 20 gone || echo "$daemon is still there: $(cat "$SLURM_ONE/run/$daemon.pid")" >&2
done
[ -z "${REMOVE:-}" ] || rm -rf "$SLURM_ONE"
