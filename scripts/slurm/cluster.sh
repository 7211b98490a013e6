# Shared by up.sh and down.sh: the folder of the one-node cluster, and functions to find its daemons.
#
# It uses its own folder and ports, so that a SLURM or MariaDB that already runs on the machine is neither used nor
# changed. `source scripts/slurm/cluster.sh` is enough for sbatch, squeue and sacct to find it.

export SLURM_ONE=${SLURM_ONE:-/var/tmp/groupwise-slurm}
export SLURM_CONF=$SLURM_ONE/etc/slurm.conf
PATH=$PATH:/usr/sbin # where Debian installs the daemons

# alive NAME: succeeds if the daemon that wrote NAME.pid is running
alive() {
  [ -s "$SLURM_ONE/run/$1.pid" ] && kill -0 "$(cat "$SLURM_ONE/run/$1.pid")" 2>/dev/null
}

# until_true SECONDS COMMAND...: run the command until it succeeds; fails after that time
until_true() {
  local tries=$(($1 * 5))
  shift
  while ! "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || return 1
    sleep 0.2
  done
}
