#!/usr/bin/env bash
# Start a real one-node SLURM: slurmctld, slurmd, munge, and slurmdbd on MariaDB for sacct.
#
#   scripts/slurm/up.sh                          takes half a minute; does nothing if it is running
#   source scripts/slurm/cluster.sh && sinfo     to use it by hand
#   scripts/slurm/down.sh
#
# Needs Debian or Ubuntu, and root to install missing packages. It runs as the current user, who alone may submit jobs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/cluster.sh"
[ -z "${SLURM_JOB_ID:-}" ] || { echo "error: this is already a SLURM job." >&2; exit 2; }

packages=(slurmctld slurmd slurm-client slurmdbd slurm-wlm-mysql-plugin munge mariadb-server)
missing=$(for package in "${packages[@]}"; do dpkg -s "$package" >/dev/null 2>&1 || echo "$package"; done)
if [ -n "$missing" ]; then
  [ "$(id -u)" = 0 ] || { echo "error: only root can install the missing packages: $(echo $missing)" >&2; exit 2; }
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

user=$(id -un) host=$(hostname -s) root=$SLURM_ONE
cores=$(nproc) memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 * 9 / 10))
umask 022
mkdir -p "$root"/{etc,run,log,state,spool}
chmod 755 "$root" "$root"/*
for template in slurm.conf slurmdbd.conf; do # placeholders are @names@
  sed -e "s|@root@|$root|g; s|@user@|$user|g; s|@host@|$host|g; s|@memory@|$memory|g" \
    -e "s|@slots@|${SLURM_ONE_SLOTS:-$((cores > 4 ? cores : 4))}|g" "$here/$template" >"$root/etc/$template"
done
chmod 600 "$root/etc/slurmdbd.conf"

if ! alive munged; then
  [ -s "$root/etc/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$root/etc/munge.key")
  munged --force --key-file="$root/etc/munge.key" --socket="$root/run/munge.sock" --pid-file="$root/run/munged.pid" \
    --seed-file="$root/run/munge.seed" --log-file="$root/log/munged.log"
fi

sql() { mariadb --no-defaults --socket="$root/run/mariadb.sock" --user=root "$@"; }
if ! alive mariadb; then
  [ -d "$root/db/mysql" ] || mariadb-install-db --no-defaults --user="$user" --datadir="$root/db" --skip-test-db \
    --auth-root-authentication-method=normal >"$root/log/mariadb-install.log" 2>&1
  setsid mariadbd --no-defaults --user="$user" --datadir="$root/db" --socket="$root/run/mariadb.sock" --port=16820 \
    --bind-address=127.0.0.1 --pid-file="$root/run/mariadb.pid" --innodb-buffer-pool-size=64M \
    --innodb-lock-wait-timeout=900 >"$root/log/mariadb.log" 2>&1 </dev/null &
  until_true 30 sql -e "SELECT 1" || { echo "error: MariaDB did not come up: $root/log/mariadb.log" >&2; exit 1; }
fi
sql -e "CREATE DATABASE IF NOT EXISTS accounts; CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';
  CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm';
  GRANT ALL ON accounts.* TO slurm@'127.0.0.1'; GRANT ALL ON accounts.* TO slurm@localhost;"

alive slurmdbd || slurmdbd
until_true 30 timeout 5 sacctmgr -n list cluster || { echo "error: slurmdbd did not come up: $root/log/slurmdbd.log" >&2; exit 1; }
sacctmgr -i add cluster one >/dev/null 2>&1 || true # it may already exist
alive slurmctld || slurmctld
alive slurmd || slurmd
ready() { [[ "$(sinfo -h -p main -o %T)" =~ ^(idle|mixed|allocated)$ ]]; }
until_true 40 ready || { echo "error: the node did not come up: $root/log/slurmd.log" >&2; sinfo -R >&2; exit 1; }
sinfo
