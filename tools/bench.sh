#!/bin/sh
# The figures of docs/performance.md: start to node Ready, apply to Running, idle memory, binary size.
# With ../shared/bench present, also the load tool's scenarios against this cluster.
set -eu
skiff=${1:?usage: bench.sh SKIFF-BINARY}
name="bench-$$"
rounds=${ROUNDS:-5}
trap '"$skiff" down --delete --name "$name" >/dev/null 2>&1 || true' EXIT

median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
now_ms() { date +%s%3N; }

echo "binary size: $(($(stat -c %s "$skiff") / 1048576)) MiB"

# Each start is from nothing: certificates, store and images are made anew.
starts=""
for _ in $(seq "$rounds"); do
    "$skiff" down --delete --name "$name" >/dev/null 2>&1 || true
    ready=$("$skiff" up --name "$name" --no-kubeconfig-merge | sed -n 's/^The node is Ready after \([0-9.]*\) ms.*/\1/p')
    starts="$starts$ready
"
done
echo "skiff up to node Ready, first start: $(printf '%s' "$starts" | median) ms (median of $rounds)"

KUBECONFIG=$("$skiff" status --name "$name" -o json | sed -n 's/.*"kubeconfig": "\(.*\)".*/\1/p')
export KUBECONFIG
sleep 5
echo "idle memory: $("$skiff" status --name "$name" | sed -n 's/^  memory *//p')"

applies=""
for round in $(seq "$rounds"); do
    pod="bench-$round"
    began=$(now_ms)
    printf '{"apiVersion":"v1","kind":"Pod","metadata":{"name":"%s"},"spec":{"terminationGracePeriodSeconds":0,"containers":[{"name":"c","image":"skiff.local/demo:v1"}]}}' "$pod" |
        kubectl apply --validate=false -f - >/dev/null
    kubectl wait --for=jsonpath='{.status.phase}'=Running "pod/$pod" --timeout=60s >/dev/null 2>&1 ||
        until [ "$(kubectl get pod "$pod" -o jsonpath='{.status.phase}')" = Running ]; do :; done
    applies="$applies$(($(now_ms) - began))
"
done
echo "kubectl apply to Running, image present, two kubectl processes included: $(printf '%s' "$applies" | median) ms (median of $rounds)"

created=""
for round in $(seq "$rounds"); do
    created="$created$("$skiff" trace "pod/bench-$round" --name "$name" -o json | sed -n 's/^  "totalUs": \([0-9]*\),*/\1/p' | awk '{print $1 / 1000}')
"
done
echo "create request to Running, by the trace: $(printf '%s' "$created" | median) ms (median of $rounds)"

bench=../shared/bench
if [ -d "$bench" ]; then
    (cd "$bench" && CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-/tmp/skiff-kubebench}" cargo build --release --quiet)
    pid=$("$skiff" status --name "$name" -o json | sed -n 's/.*"pid": \([0-9]*\),/\1/p' | head -1)
    "${CARGO_TARGET_DIR:-/tmp/skiff-kubebench}/release/kubebench" --kubeconfig "$KUBECONFIG" --pids "skiff=$pid" ${SCENARIOS:-write list watch}
fi
