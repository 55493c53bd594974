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

# Load on the API server, and the same on upstream's in the same run where Go can build that. Upstream's
# binaries are kept in UPSTREAM, so that only the first run builds them.
bench=$(pwd)/../shared/bench
[ -d "$bench" ] || exit 0
target=${CARGO_TARGET_DIR:-/tmp/skiff-kubebench}
(cd "$bench" && CARGO_TARGET_DIR="$target" cargo build --release --quiet)
kubebench=$target/release/kubebench
scenarios=${SCENARIOS:-write list watch}
passes=${PASSES:-3}
results=$(mktemp -d)
"$skiff" down --delete --name "$name" >/dev/null

ours() {
    "$skiff" up --name "$name" --no-kubeconfig-merge >/dev/null
    KUBECONFIG=$("$skiff" status --name "$name" -o json | sed -n 's/.*"kubeconfig": "\(.*\)".*/\1/p')
    pids="skiff=$("$skiff" status --name "$name" -o json | sed -n 's/.*"pid": \([0-9]*\),/\1/p' | head -1)"
}

theirs() {
    pids=$(ANCHORS=$upstream "$bench/upstream/up.sh" | tail -1)
    KUBECONFIG=$upstream/bench-run/admin.kubeconfig
}

# measure WHO: each scenario on a server freshly started, and after a moment of rest.
measure() {
    for pass in $(seq "$passes"); do
        for scenario in $scenarios; do
            case $1 in
            skiff) ours ;;
            upstream) theirs ;;
            esac
            sleep "${REST:-10}"
            "$kubebench" --kubeconfig "$KUBECONFIG" --pids "$pids" --out "$results/$1-$scenario-$pass.json" rss "$scenario"
            case $1 in
            skiff) "$skiff" down --delete --name "$name" >/dev/null ;;
            upstream) ANCHORS=$upstream "$bench/upstream/down.sh" ;;
            esac
        done
    done
    "$kubebench" median "$results/$1.json" "$results/$1"-*-*.json >/dev/null
}

measure skiff
if command -v go >/dev/null; then
    upstream=${UPSTREAM:-$HOME/.cache/skiff-upstream}
    sh tools/upstream.sh "$upstream"
    measure upstream
    python3 tools/bench-table.py "$results/upstream.json" "$results/skiff.json"
else
    echo "Without Go there is no upstream to measure beside; its figures of another machine:"
    python3 tools/bench-table.py "$bench/upstream-1.36.4.json" "$results/skiff.json"
fi
echo "The runs are in $results"
