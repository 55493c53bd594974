#!/bin/sh
# `make gateway-conformance`: builds Gateway API's conformance suite from its Go module, starts a fresh cluster on a machine of its
# own (a namespace, tools/machines.sh), runs the suite against it, and takes everything down again. See docs/gateway.md.
#
#   run.sh SKIFF-BINARY
#
# TEST runs one test by its short name; SKIP is a list of tests to leave out, with commas. KEEP=1 leaves the cluster running.
set -eu
skiff=$(realpath "${1:?usage: run.sh SKIFF-BINARY}")
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-$here/../../target/gateway}
mkdir -p "$out"
out=$(cd "$out" && pwd)
# shellcheck source=tools/machines.sh
. "$here/../../tools/machines.sh"
name=${NAME:-gateway-1}
# Not the default name: other clusters of this computer may have it.
cluster=gw

command -v go >/dev/null || {
    echo "make gateway-conformance builds the suite from its Go module and needs Go 1.26 or newer: install it and try again" >&2
    exit 1
}

cd "$here"
export CGO_ENABLED=0
version=$(go list -m -f '{{.Version}}' sigs.k8s.io/gateway-api/conformance)
go test -c -vet=off -buildvcs=false -ldflags "-s -w" -o "$out/gateway.test" sigs.k8s.io/gateway-api/conformance
go build -buildvcs=false -ldflags "-s -w" -o "$out/echo-basic" sigs.k8s.io/gateway-api/conformance/echo-basic
module=$(go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api/conformance)
images=$(grep -rhos 'registry.k8s.io/gateway-api/[a-z/-]*echo-basic:[^" ]*' "$module/base" "$module/tests" | sort -u)
# The suite's base has a DNS server for UDPRoutes, which are not run here: something that runs takes its place.
images="$images $(grep -rhos 'registry.k8s.io/coredns/coredns:[^" ]*' "$module/base" | sort -u)"

finish() {
    if [ -n "${KEEP:-}" ]; then
        echo "the cluster is left running: nsenter -t $(cat "$out/machines/$name.pid") --net, KUBECONFIG=$out/data/admin.kubeconfig"
        return
    fi
    machine "$name" "$skiff" down --name "$cluster" --data-dir "$out/data" --delete >/dev/null || true
    machines_end
}
trap finish EXIT
trap 'exit 130' INT TERM

machines_start "$out/machines" "$name"
# Gateways get addresses of their own: the suite has several without a hostname at one port.
addresses=""
for last in $(seq 101 140); do
    machine "$name" ip addr add "$machines_network.$last/32" dev eth0
    addresses="$addresses,$machines_network.$last"
done
# shellcheck disable=SC2086
machine "$name" "$skiff" up --name "$cluster" --data-dir "$out/data" --no-kubeconfig-merge --ingress-http-port 80 --ingress-https-port 443 \
    --gateway-api --gateway-addresses "${addresses#,}" ${UP:-}
for image in $images; do
    sh "$here/image.sh" "$out/echo-basic" "$out/image.tar" "$image"
    machine "$name" "$skiff" image --name "$cluster" --data-dir "$out/data" import "$out/image.tar"
done

# The release of the definitions may be newer than that of the suite.
status=0
export KUBECONFIG="$out/data/admin.kubeconfig"
machines_enter "$name" --net "$out/gateway.test" -test.v -test.timeout 60m -test.run '^TestConformance$' \
    -gateway-class skiff -allow-crds-mismatch \
    -conformance-profiles "${PROFILES:-GATEWAY-HTTP,GATEWAY-GRPC,GATEWAY-TLS}" \
    -organization skiff -project skiff -url https://skiff.io -version "$("$skiff" --version | tr ' ' -)" -contact none \
    -report-output "$out/report.yaml" ${TEST:+-run-test "$TEST"} ${SKIP:+-skip-tests "$SKIP"} ${SUITE:-} >"$out/suite.log" 2>&1 || status=$?
grep -E '^ *--- (PASS|FAIL|SKIP): TestConformance/[A-Za-z0-9]+ ' "$out/suite.log" | sed 's/^ *--- //' | sort >"$out/results.txt" || true
echo "Gateway API $version: $(grep -c ^PASS "$out/results.txt" || true) passed, $(grep -c ^FAIL "$out/results.txt" || true) failed, $(grep -c ^SKIP "$out/results.txt" || true) skipped"
grep ^FAIL "$out/results.txt" || true
echo "the report is $out/report.yaml, the whole log $out/suite.log"
exit "$status"
