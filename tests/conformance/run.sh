#!/bin/sh
# `make conformance`: builds the official end-to-end suite, starts a fresh cluster, runs the suite against it, writes
# the table, and takes everything down again. See docs/conformance.md.
#
#   run.sh SKIFF-BINARY
#
# FOCUS and SKIP are regular expressions over test names, PARALLEL the number of tests at a time. NODES is the number of
# machines, which are namespaces of this one (tools/machines.sh): a server, and agents that join it. UP holds more
# arguments for `skiff up`. RUNTIME=containerd runs pods by Debian's containerd instead of the embedded runtime. DUAL_STACK=1
# gives machines, pods and services IPv6 addresses too. CSI_PROGRAMS is a folder with the CSI hostpath driver and its sidecars,
# for the tests of storage drivers; they also need UP="--root-dir /var/lib/kubelet". KEEP=1 leaves the cluster running for a look at what is left.
set -eu
# Absolute, because the suite is built in its own folder.
skiff=$(realpath "${1:?usage: run.sh SKIFF-BINARY}")
focus=${FOCUS:-'\[Conformance\]'}
skip=${SKIP:-}
parallel=${PARALLEL:-4}
nodes=${NODES:-1}
name=${NAME:-conformance}

here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/../../target/conformance}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# shellcheck source=tools/machines.sh
. "$here/../../tools/machines.sh"
server=$name-1
data=$out/machines/$server/lib/skiff

command -v go >/dev/null || {
    echo "make conformance builds the official suite from its Go module and needs Go 1.26 or newer: install it and try again" >&2
    exit 1
}

cd "$here"
version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)
if [ -z "$module" ]; then
    go mod download
    module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)
fi
echo "building the suite of $version (the first time takes ten minutes)"
export CGO_ENABLED=0
stamp="-X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1"
stamp="$stamp -X k8s.io/component-base/version.gitMinor=$(echo "$version" | cut -d. -f2)"
build() { go build -buildvcs=false -ldflags "-s -w $stamp" -o "$out/" "$@"; }
build ./images ./report ./pause ./sh ./coredns github.com/onsi/ginkgo/v2/ginkgo k8s.io/kubernetes/cmd/kubectl \
    k8s.io/kubernetes/test/images/agnhost k8s.io/kubernetes/test/images/nonewprivs \
    k8s.io/kubernetes/test/images/regression-issue-74839 k8s.io/sample-apiserver
go test -c -vet=off -buildvcs=false -ldflags "-s -w $stamp" -o "$out/e2e.test" k8s.io/kubernetes/test/e2e

machines=""
for number in $(seq "$nodes"); do
    machines="$machines $name-$number"
done
registry=""
finish() {
    [ -z "$registry" ] || kill "$registry" 2>/dev/null || true
    if [ -n "${KEEP:-}" ]; then
        echo "the cluster is left running: nsenter -t $(cat "$out/machines/$server.pid") --net, KUBECONFIG=$data/admin.kubeconfig"
        return
    fi
    for one in $machines; do
        machine "$one" "$skiff" down --delete >/dev/null || true
    done
    machines_end
}
trap finish EXIT
trap 'exit 130' INT TERM

# shellcheck disable=SC2086
machines_start "$out/machines" $machines
if [ -n "${DUAL_STACK:-}" ]; then
    number=0
    machines_enter switch --net ip addr add fd31:78::ff/64 dev switch nodad
    for one in $machines; do
        number=$((number + 1))
        machine "$one" ip addr add "fd31:78::$number/64" dev eth0 nodad
        machine "$one" ip route add default via fd31:78::ff
    done
    UP="--cluster-cidr 10.244.0.0/16,fd00:10:244::/48 --service-cluster-ip-range 10.96.0.0/16,fd00:10:96::/112 ${UP:-}"
fi

"$out/e2e.test" --list-images >"$out/images.txt"
rm -f "$out/repos.yaml"
namespaces=""
for one in $machines; do
    namespaces="$namespaces,/proc/$(cat "$out/machines/$one.pid")/ns/net"
done
"$out/images" -programs "$out" -drivers "${CSI_PROGRAMS:-}" -module "$module" -list "$out/images.txt" -repos "$out/repos.yaml" -netns "${namespaces#,}" &
registry=$!
until [ -s "$out/repos.yaml" ]; do
    kill -0 "$registry" || exit 1
    sleep 0.1
done

# containerd_on MACHINE: Debian's containerd, with its files in the machine's folder and the plugins of Debian's package.
containerd_on() {
    folder=$out/machines/$1/containerd
    mkdir -p "$folder/bin" "$folder/net.d"
    ln -s /usr/lib/cni/loopback "$folder/bin/loopback"
    pause=$(sed -n 's/^gcRegistry: //p' "$out/repos.yaml")/$(grep -o 'pause:[0-9.]*' "$out/images.txt" | sort -V | tail -n 1)
    # CAP_SYS_RESOURCE may be missing: then oom_score_adj can only be raised.
    cat >"$folder/config.toml" <<TOML
version = 2
root = "$folder/root"
state = "/run/skiff/containerd"
[grpc]
  address = "/run/skiff/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$folder/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "$pause"
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$folder/bin"
    conf_dir = "$folder/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
TOML
    (machine "$1" containerd --config "$folder/config.toml" >"$out/containerd-$1.log" 2>&1 </dev/null) &
    until machine "$1" ctr --address /run/skiff/containerd.sock version >/dev/null 2>&1; do sleep 0.1; done
}
case ${RUNTIME:-skiff} in
    skiff) endpoint="" ;;
    containerd)
        endpoint="--container-runtime-endpoint unix:///run/skiff/containerd.sock"
        for one in $machines; do containerd_on "$one"; done
        ;;
    *) echo "RUNTIME is skiff or containerd, not $RUNTIME" >&2; exit 1 ;;
esac

# shellcheck disable=SC2086
machine "$server" "$skiff" up --no-kubeconfig-merge $endpoint ${UP:-}
for one in $machines; do
    [ "$one" != "$server" ] || continue
    # It prints `skiff join …`.
    # shellcheck disable=SC2046,SC2086
    machine "$one" "$skiff" $(machine "$server" "$skiff" token create | sed -n 's/^skiff //p') $endpoint
done

# Ginkgo runs what is marked serial alone, after the rest.
rm -rf "$out/reports"
status=0
KUBE_TEST_REPO_LIST="$out/repos.yaml" machines_enter "$server" --net "$out/ginkgo" run --procs="$parallel" --timeout=24h --no-color \
    --focus="$focus" --skip="${skip:-^$}" --output-interceptor-mode=none \
    "$out/e2e.test" -- --kubeconfig="$data/admin.kubeconfig" --kubectl-path="$out/kubectl" --provider=skeleton --num-nodes="$nodes" \
    --disable-log-dump --dump-logs-on-failure=false \
    --report-dir="$out/reports" --report-complete-ginkgo ${SUITE:-} >"$out/suite.log" 2>&1 || status=$?

if [ -s "$out/reports/ginkgo/report.json" ]; then
    "$out/report" -suite "$version" -focus "$focus" -skip "$skip" "$out/reports/ginkgo/report.json" >"$out/conformance.md"
    sed '/^## /,$d' "$out/conformance.md"
else
    tail -n 40 "$out/suite.log"
fi
echo "every test is in $out/conformance.md, the whole log in $out/suite.log"
exit "$status"
