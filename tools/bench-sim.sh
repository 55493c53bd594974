#!/bin/sh
# Simulated nodes at scale: NODES nodes and PODS pods (of Deployments of 1,000) on a cluster of its own. Prints pods a
# second from the apply until all are Running and ready, memory at its peak and afterwards, and the CPU of a cluster at
# rest. Cleans up whatever happens.
set -eu
skiff=${1:?usage: bench-sim.sh SKIFF-BINARY}
nodes=${NODES:-1000}
pods=${PODS:-30000}
rest=${REST:-60}
name="bench-sim-$$"
work=$(mktemp -d)
sim=""
clean_up() {
    [ -z "$sim" ] || kill "$sim" 2>/dev/null || true
    "$skiff" down --delete --name "$name" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

now_ms() { date +%s%3N; }
# memory PID KEY: a figure of /proc in MiB.
memory() { awk -v key="$2:" '$1 == key {print int($2 / 1024)}' "/proc/$1/status"; }
# cpu PID: user and system time in hundredths of a second.
cpu() { sed 's/.*) //' "/proc/$1/stat" | awk '{print $12 + $13}'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN {printf "%.2f", (b > 0) ? a / b : 0}'; }
show_memory() {
    echo "memory $1: server $(memory "$server" VmRSS) MiB, peak $(memory "$server" VmHWM); sim $(memory "$sim" VmRSS) MiB, peak $(memory "$sim" VmHWM)"
}

# The network of pods that is usual has room for 256 nodes.
"$skiff" up --name "$name" --no-kubeconfig-merge --components api,controllers,scheduler --cluster-cidr 100.64.0.0/10 >/dev/null
KUBECONFIG=$("$skiff" status --name "$name" -o json | sed -n 's/.*"kubeconfig": "\(.*\)".*/\1/p')
export KUBECONFIG
server=$("$skiff" status --name "$name" -o json | sed -n 's/.*"pid": \([0-9]*\),*/\1/p' | head -1)

began=$(now_ms)
"$skiff" sim nodes "$nodes" --name "$name" >"$work/sim.log" 2>&1 &
sim=$!
until grep -q "simulated nodes are ready" "$work/sim.log"; do
    kill -0 "$sim" 2>/dev/null || { cat "$work/sim.log" >&2; exit 1; }
    sleep 0.1
done
echo "$nodes nodes ready after $(ratio $(($(now_ms) - began)) 1000) s"
sleep 5
show_memory "with the nodes"

# at_rest WHAT: CPU over a while in which nothing happens but heartbeats.
at_rest() {
    before_server=$(cpu "$server")
    before_sim=$(cpu "$sim")
    sleep "$rest"
    used_server=$(($(cpu "$server") - before_server))
    used_sim=$(($(cpu "$sim") - before_sim))
    echo "at rest $1: server $(ratio "$used_server" "$rest") % of a core ($(ratio $((used_server * 10000)) $((rest * nodes))) µs of CPU a node and second), sim $(ratio "$used_sim" "$rest") %"
}
at_rest "with the nodes"

# A Deployment has up to 1,000 pods.
left=$pods
number=0
: >"$work/pods.yaml"
while [ "$left" -gt 0 ]; do
    replicas=$((left < 1000 ? left : 1000))
    left=$((left - replicas))
    cat >>"$work/pods.yaml" <<YAML
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: load-$number, labels: {bench: sim}}
spec:
  replicas: $replicas
  selector: {matchLabels: {app: load-$number}}
  template:
    metadata: {labels: {app: load-$number}}
    spec:
      terminationGracePeriodSeconds: 0
      containers: [{name: c, image: "example.com/load:v1", resources: {requests: {cpu: 10m, memory: 16Mi}}}]
YAML
    number=$((number + 1))
done
ready() {
    kubectl get deployments -l bench=sim -o jsonpath='{range .items[*]}{.status.readyReplicas}{"\n"}{end}' |
        awk '{sum += $1} END {print sum + 0}'
}
before_server=$(cpu "$server")
before_sim=$(cpu "$sim")
began=$(now_ms)
kubectl create --validate=false -f "$work/pods.yaml" >/dev/null
while :; do
    running=$(ready)
    [ "$running" -lt "$pods" ] || break
    kill -0 "$sim" 2>/dev/null || { cat "$work/sim.log" >&2; exit 1; }
    [ -d "/proc/$server" ] || { echo "the server is gone" >&2; exit 1; }
    [ $(($(now_ms) - began)) -lt "$((${PATIENCE:-1800} * 1000))" ] || { echo "only $running of $pods pods run" >&2; exit 1; }
    sleep 0.5
done
took=$(($(now_ms) - began))
echo "$pods pods Running and ready after $(ratio "$took" 1000) s: $(ratio $((pods * 1000)) "$took") a second"
echo "CPU meanwhile: server $(ratio $(($(cpu "$server") - before_server)) 100) s, sim $(ratio $(($(cpu "$sim") - before_sim)) 100) s"
show_memory "with all pods"
sleep "${SETTLE:-30}"
show_memory "after a rest"
at_rest "with all pods"

began=$(now_ms)
kubectl delete deployments -l bench=sim >/dev/null
until kubectl get --raw '/api/v1/namespaces/default/pods?limit=1' | grep -q '"items":\[\]'; do sleep 0.5; done
echo "$pods pods deleted after $(ratio $(($(now_ms) - began)) 1000) s"
sleep "${SETTLE:-30}"
show_memory "after their deletion"
