# Machines for scripts: namespaces of this one (network, mounts, host name, cgroups), connected by a switch in a namespace of
# its own. Source this file, then:
#
#   machines_start FOLDER NAME…   makes the machines; their /var/lib/skiff, /var/lib/kubelet and /run/skiff lie below FOLDER
#   machine NAME COMMAND…         runs a command on one
#   machine_address NAME          prints its address
#   machines_end                  stops and removes all of it; for an EXIT trap
#
# Each machine is alone with its cgroups and ports, so that all of them may run a cluster of the default name.

machines_folder=""
machines_network=172.31.78

machines_start() {
    machines_folder=$1
    shift
    mkdir -p "$machines_folder"
    machines_hold switch unshare --net
    machines_enter switch --net ip link add switch type bridge
    machines_enter switch --net ip addr add "$machines_network.254/24" dev switch
    machines_enter switch --net ip link set switch up
    machines_count=0
    for one in "$@"; do
        machines_count=$((machines_count + 1))
        machines_add "$one" "$machines_count"
    done
}

# Keeps namespaces alive: a process that sleeps in them.
machines_hold() {
    held=$1
    shift
    # In a session of its own: what is sent to the script's group must not end a machine before it is cleaned.
    setsid "$@" sleep infinity >/dev/null 2>&1 &
    echo $! >"$machines_folder/$held.pid"
    until [ "$(cat "/proc/$!/comm")" = sleep ]; do sleep 0.01; done
    readlink "/proc/$!/ns/mnt" >"$machines_folder/$held.mounts"
}

machines_enter() {
    entered=$(cat "$machines_folder/$1.pid")
    shift
    nsenter -t "$entered" "$@"
}

# The cgroups of a machine, one a hierarchy.
machines_cgroups() {
    for hierarchy in /sys/fs/cgroup/*/; do
        [ ! -e "$hierarchy/cgroup.procs" ] || echo "${hierarchy}machine-$1"
    done
    [ ! -e /sys/fs/cgroup/cgroup.procs ] || echo "/sys/fs/cgroup/machine-$1"
}

# Those in this cgroup and below it.
machines_processes() { find "$1" -name cgroup.procs -exec cat {} + 2>/dev/null; }

machines_add() {
    mkdir -p "$machines_folder/$1/lib" "$machines_folder/$1/kubelet" "$machines_folder/$1/run" \
        /var/lib/skiff /var/lib/kubelet /run/skiff
    cgroups=$(machines_cgroups "$1")
    for cgroup in $cgroups; do
        mkdir -p "$cgroup"
        for file in cpuset.cpus cpuset.mems; do
            [ ! -e "$cgroup/$file" ] || cat "$cgroup/../$file" >"$cgroup/$file"
        done
    done
    # The process must be in its cgroups when it makes the namespace, which begins there.
    machines_hold "$1" sh -c 'for cgroup in $1; do echo $$ >"$cgroup/cgroup.procs"; done
        shift; exec unshare --net --mount --uts --cgroup "$@"' machine "$cgroups"
    ip link add eth0 netns "$(cat "$machines_folder/$1.pid")" type veth \
        peer name "port$2" netns "$(cat "$machines_folder/switch.pid")"
    machines_enter switch --net ip link set "port$2" master switch up
    for cgroup in $cgroups; do
        machines_enter "$1" --mount mount --bind "$cgroup" "$(dirname "$cgroup")"
    done
    echo "$machines_network.$2" >"$machines_folder/$1.address"
    machine "$1" sh -ec '
        mount --make-rshared /
        echo "$1" >/proc/sys/kernel/hostname
        mount --bind "$2/lib" /var/lib/skiff
        mount --bind "$2/kubelet" /var/lib/kubelet
        mount --bind "$2/run" /run/skiff
        ip link set lo up
        ip addr add "$3/24" dev eth0
        ip link set eth0 up
        ip route add default via "$4.254"' \
        machine "$1" "$machines_folder/$1" "$machines_network.$2" "$machines_network"
}

# Also into the cgroups: a program's place there is not that of its namespace.
machine() {
    on=$1
    shift
    machines_enter "$on" --net --mount --uts --cgroup sh -c '
        for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*/; do
            [ ! -e "$hierarchy/cgroup.procs" ] || echo $$ >"$hierarchy/cgroup.procs"
        done
        exec "$@"' machine "$@"
}

machine_address() { cat "$machines_folder/$1.address"; }

# Ends what still runs on the machines, which is what shares their mount namespaces or is in their cgroups, and removes
# cgroups and files.
machines_end() {
    [ -n "$machines_folder" ] || return 0
    for file in "$machines_folder"/*.pid; do
        name=$(basename "$file" .pid)
        pid=$(cat "$file")
        # If it was killed, the number may be another's by now, with the namespace of who knows whom.
        own=$(readlink "/proc/$pid/ns/mnt" || true)
        if [ "$own" != "$(cat "$machines_folder/$name.mounts")" ] || [ "$(cat "/proc/$pid/comm")" != sleep ]; then
            own=""
            pid=""
        fi
        if [ "$name" != switch ] && [ -n "$own" ] && [ "$own" != "$(readlink /proc/self/ns/mnt)" ]; then
            for process in /proc/[0-9]*; do
                [ "$(readlink "$process/ns/mnt" 2>/dev/null)" != "$own" ] || kill -9 "${process#/proc/}" 2>/dev/null || true
            done
        fi
        if [ -n "$pid" ]; then
            kill -9 "$pid" 2>/dev/null || true
            wait "$pid" 2>/dev/null || true
        fi
        [ "$name" = switch ] || for cgroup in $(machines_cgroups "$name"); do
            # Containers, and what looks after them.
            until [ -z "$(machines_processes "$cgroup")" ]; do
                # shellcheck disable=SC2046
                kill -9 $(machines_processes "$cgroup") 2>/dev/null || true
                sleep 0.05
            done
            find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        done
    done
    rm -rf --one-file-system "$machines_folder"
    machines_folder=""
}
