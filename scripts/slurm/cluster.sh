# What up.sh and down.sh share: where the one-node cluster lives, and how its daemons are found again.
#
# All of it lies in one folder and on ports of its own, so that a SLURM or MariaDB that the machine may run already is
# neither used nor touched. `source scripts/slurm/cluster.sh` is enough for sbatch, squeue and sacct to find it.

export SLURM_ONE=${SLURM_ONE:-/var/tmp/groupwise-slurm}
export SLURM_CONF=$SLURM_ONE/etc/slurm.conf
PATH=$PATH:/usr/sbin # where Debian has the daemons

# alive NAME: does the daemon that wrote NAME.pid run?
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
