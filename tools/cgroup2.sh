#!/bin/sh
# cgroup2.sh COMMAND…: runs it in a mount namespace where /sys/fs/cgroup is the unified hierarchy alone, as on a machine
# that boots with cgroup v2. On a machine whose controllers are in hierarchies of v1, v2 has those that are left over
# (see cgroup.controllers): processes, devices and freezing work, limits of the missing controllers do not.
set -eu
[ $# -gt 0 ] || { echo "usage: cgroup2.sh COMMAND…" >&2; exit 2; }
exec unshare --mount sh -euc '
    umount -R /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
    echo "cgroup v2 has: $(cat /sys/fs/cgroup/cgroup.controllers)" >&2
    exec "$@"' cgroup2 "$@"
