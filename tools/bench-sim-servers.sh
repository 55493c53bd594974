#!/bin/sh
# Simulated nodes at scale against three servers, each beside a member of etcd, on machines that are namespaces of this one:
# NODES nodes, a third by each server, and PODS pods (of Deployments of 1,000). Prints pods a second from the apply until all
# are Running and ready, memory and CPU of servers, members and simulations, and how long it takes until a new pod runs
# after the server was killed that leads. Takes root and takes everything down again.
#
#   bench-sim-servers.sh SKIFF-BINARY
set -eu
skiff=$(realpath "${1:?usage: bench-sim-servers.sh SKIFF-BINARY}")
nodes=${NODES:-1000}
pods=${PODS:-10000}
rest=${REST:-30}
work=$(mktemp -d)
# shellcheck source=tools/machines.sh
. "$(dirname "$0")/machines.sh"
servers="sim-one sim-two sim-three"
clean_up() {
    status=$?
    [ "$status" -eq 0 ] || tail -n 20 "$work"/*.log >&2 || true
    for one in $servers; do
        machine "$one" "$skiff" down --delete >/dev/null 2>&1 || true
    done
    machines_end
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

now_ms() { date +%s%3N; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN {printf "%.2f", (b > 0) ? a / b : 0}'; }
# figure KEY PID…: the sum of a figure of /proc in MiB.
figure() {
    key=$1
    shift
    for pid in "$@"; do cat "/proc/$pid/status" 2>/dev/null; done | awk -v key="$key:" '$1 == key {sum += $2} END {print int(sum / 1024)}'
}
# cpu PID…: user and system time in hundredths of a second.
cpu() {
    for pid in "$@"; do sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null; done | awk '{sum += $12 + $13} END {print sum + 0}'
}
wait_until() {
    what=$1
    shift
    deadline=$(($(date +%s) + ${PATIENCE:-1800}))
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$deadline" ] || { echo "gave up waiting: $what" >&2; exit 1; }
        sleep 0.1
    done
}
# recorded MACHINE NAME COMMAND…: in the background, with its id in a file and its output in a log.
recorded() {
    where=$1
    name=$2
    shift 2
    (machine "$where" sh -c 'echo $$ >"$1"; shift; exec "$@"' recorded "$work/$name.pid" "$@" >"$work/$name.log" 2>&1 </dev/null) &
    wait_until "$name starts" test -s "$work/$name.pid"
}
pid() { cat "$work/$1.pid"; }
# on MACHINE ARGUMENT…: kubectl of that server's administrator.
on() {
    where=$1
    shift
    machine "$where" env KUBECONFIG="$machines_folder/$where/lib/skiff/admin.kubeconfig" kubectl --request-timeout=10s "$@"
}

# shellcheck disable=SC2086
machines_start "$work/machines" $servers
members=""
endpoints=""
for one in $servers; do
    members="$members,$one=http://$(machine_address "$one"):2380"
    endpoints="$endpoints,http://$(machine_address "$one"):2379"
done
for one in $servers; do
    address=$(machine_address "$one")
    recorded "$one" "etcd-$one" etcd --name "$one" --data-dir "$work/etcd-$one" --quota-backend-bytes 8589934592 \
        --listen-client-urls "http://$address:2379" --advertise-client-urls "http://$address:2379" \
        --listen-peer-urls "http://$address:2380" --initial-advertise-peer-urls "http://$address:2380" \
        --initial-cluster "${members#,}" --log-level error
done
wait_until "etcd has a leader" machine sim-one curl -sf "http://$(machine_address sim-one):2379/health"
# The network of pods that is usual has room for 256 nodes.
machine sim-one "$skiff" up --no-kubeconfig-merge --etcd-servers "${endpoints#,}" --cluster-cidr 100.64.0.0/10 >/dev/null
for one in sim-two sim-three; do
    # shellcheck disable=SC2046
    machine "$one" "$skiff" $(machine sim-one "$skiff" token create --server | cut -d' ' -f2-) >/dev/null
done
for one in $servers; do
    machine "$one" "$skiff" status -o json | sed -n 's/.*"pid": \([0-9]*\),*/\1/p' | head -1 >"$work/server-$one.pid"
done
all() { for one in $servers; do pid "$1-$one"; done; }

# simulate MACHINE SERVER: the share of nodes that MACHINE's simulation plays, against the API of a server.
simulate() {
    share=$((nodes / 3))
    [ "$1" != sim-three ] || share=$((nodes - 2 * share))
    printf 'nodes: [{count: %d, prefix: %s-node-}]\n' "$share" "$1" >"$work/$1.yaml"
    recorded "$2" "sim-$1" "$skiff" sim nodes -f "$work/$1.yaml" --kubeconfig "$machines_folder/$2/lib/skiff/admin.kubeconfig"
    wait_until "the nodes of $1" grep -q "simulated nodes are ready" "$work/sim-$1.log"
}
began=$(now_ms)
for one in $servers; do simulate "$one" "$one"; done
echo "$nodes nodes ready after $(ratio $(($(now_ms) - began)) 1000) s"

show_memory() {
    for one in $servers; do
        echo "memory $1: $one: server $(figure VmRSS "$(pid "server-$one")") MiB, peak $(figure VmHWM "$(pid "server-$one")"); etcd $(figure VmRSS "$(pid "etcd-$one")") MiB"
    done
    # shellcheck disable=SC2046
    echo "memory $1: simulations $(figure VmRSS $(all sim)) MiB"
}
# at_rest WHAT: CPU over a while in which nothing happens but heartbeats.
at_rest() {
    # shellcheck disable=SC2046
    {
        before_servers=$(cpu $(all server))
        before_etcd=$(cpu $(all etcd))
        sleep "$rest"
        used_servers=$(($(cpu $(all server)) - before_servers))
        used_etcd=$(($(cpu $(all etcd)) - before_etcd))
    }
    echo "at rest $1: three servers $(ratio "$used_servers" "$rest") % of a core ($(ratio $((used_servers * 10000)) $((rest * nodes))) µs of CPU a node and second), three members of etcd $(ratio "$used_etcd" "$rest") %"
}
show_memory "with the nodes"
at_rest "with the nodes"

# deployment NAME REPLICAS LABEL
deployment() {
    cat <<YAML
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: $1, labels: {bench: $3}}
spec:
  replicas: $2
  selector: {matchLabels: {app: $1}}
  template:
    metadata: {labels: {app: $1}}
    spec:
      terminationGracePeriodSeconds: 0
      nodeSelector: {sim.skiff.io/node: "true"}
      containers: [{name: c, image: "example.com/load:v1", resources: {requests: {cpu: 10m, memory: 16Mi}}}]
YAML
}
left=$pods
number=0
: >"$work/pods.yaml"
while [ "$left" -gt 0 ]; do
    replicas=$((left < 1000 ? left : 1000))
    left=$((left - replicas))
    deployment "load-$number" "$replicas" sim >>"$work/pods.yaml"
    number=$((number + 1))
done
# ready SERVER LABEL
ready() {
    on "$1" get deployments -l "bench=$2" -o jsonpath='{range .items[*]}{.status.readyReplicas}{"\n"}{end}' |
        awk '{sum += $1} END {print sum + 0}'
}
are_ready() { [ "$(ready "$1" "$2")" -ge "$3" ]; }
# shellcheck disable=SC2046
{
    before_servers=$(cpu $(all server))
    before_etcd=$(cpu $(all etcd))
}
began=$(now_ms)
on sim-one create --validate=false -f "$work/pods.yaml" >/dev/null
wait_until "$pods pods run" are_ready sim-one sim "$pods"
took=$(($(now_ms) - began))
echo "$pods pods Running and ready after $(ratio "$took" 1000) s: $(ratio $((pods * 1000)) "$took") a second"
# shellcheck disable=SC2046
echo "CPU meanwhile: three servers $(ratio $(($(cpu $(all server)) - before_servers)) 100) s, three members of etcd $(ratio $(($(cpu $(all etcd)) - before_etcd)) 100) s"
show_memory "with all pods"
at_rest "with all pods"

# The server that leads is killed; its simulation goes on at another one, as agents do.
leader=$(on sim-one -n kube-system get lease kube-scheduler -o 'jsonpath={.spec.holderIdentity}')
leader=${leader%%_*}
for one in $servers; do [ "$one" = "$leader" ] || other=$one; done
deployment after 100 after >"$work/after.yaml"
began=$(now_ms)
kill -9 "$(pid "server-$leader")"
kill "$(pid "sim-$leader")"
rm "$work/sim-$leader.pid"
wait_until "a write" on "$other" create --validate=false -f "$work/after.yaml"
echo "$leader, which led, was killed: the next write was acknowledged after $(ratio $(($(now_ms) - began)) 1000) s"
simulate "$leader" "$other"
wait_until "new pods run" are_ready "$other" after 100
echo "100 new pods ran after $(ratio $(($(now_ms) - began)) 1000) s (the leader's lease lasts 15 s)"
on "$other" get deployments -l bench=sim -o jsonpath='{range .items[*]}{.status.readyReplicas}{"\n"}{end}' |
    awk -v pods="$pods" '{sum += $1} END {printf "%d of %d pods are ready as before\n", sum, pods}'
