#!/bin/sh
# `make critest`: the validation suite of CRI (critest) and crictl, built by Go from their module, against the embedded
# runtime alone (`skiff runtime`) on a machine made of namespaces. The images are stand-ins that a registry of this
# machine serves. Takes root and takes everything down again.
#
#   run.sh SKIFF-BINARY
#
# FOCUS and SKIP are regular expressions over the names of tests; what is skipped by default cannot pass with stand-ins
# (docs/conformance.md). OUT is where programs and logs go.
set -eu
skiff=$(realpath "${1:?usage: run.sh SKIFF-BINARY}")
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${OUT:-$here/../../target/critest}")
mkdir -p "$out/bin" "$out/src"
# shellcheck source=tools/machines.sh
. "$here/../../tools/machines.sh"
cri_tools=v1.36.0
skip=${SKIP:-'public image with digest|should support MaskedPaths'}

command -v go >/dev/null || {
    echo "make critest builds the suite from its Go module and needs Go 1.26 or newer: install it and try again" >&2
    exit 1
}
export CGO_ENABLED=0
# As a dependency of a module of ours, because the module is not made for `go install` of a test.
if [ ! -x "$out/bin/critest" ]; then
    (
        cd "$out/src"
        rm -f go.mod go.sum
        go mod init critest-build >/dev/null 2>&1
        go mod edit -require="sigs.k8s.io/cri-tools@$cri_tools"
        printf '//go:build tools\n\npackage tools\n\nimport _ "sigs.k8s.io/cri-tools/cmd/crictl"\n' >tools.go
        go mod tidy >/dev/null 2>&1
        go build -mod=mod -ldflags "-s -w" -o "$out/bin/crictl" sigs.k8s.io/cri-tools/cmd/crictl
        go test -mod=mod -c -vet=off -ldflags "-s -w" -o "$out/bin/critest" sigs.k8s.io/cri-tools/cmd/critest
    )
fi
(cd "$here/../conformance" && go build -buildvcs=false -ldflags "-s -w" -o "$out/bin/" ./images ./sh ./pause k8s.io/kubernetes/test/images/nonewprivs)

registry=""
runtime=""
finish() {
    [ -z "$registry" ] || kill "$registry" 2>/dev/null || true
    if [ -n "$runtime" ]; then
        kill "$runtime" 2>/dev/null || true
        wait "$runtime" 2>/dev/null || true
        machine critest "$skiff" runtime --delete >>"$out/runtime.log" 2>&1 || true
    fi
    machines_end
}
trap finish EXIT
trap 'exit 130' INT TERM

machines_start "$out/machine" critest
files=$out/machine/critest
machine critest sh -ec '
    for folder in var/lib/skiff-runtime run/skiff-runtime etc/cni/net.d; do
        mkdir -p "/$folder" "$1/$folder"
        mount --bind "$1/$folder" "/$folder"
    done' folders "$files"
cat >"$files/etc/cni/net.d/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "critest", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.77.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
# The suite names images by their registries, and not all of them can be told to be elsewhere.
names=registry.k8s.io,k8s.gcr.io,gcr.io
cp /etc/hosts "$files/hosts"
echo "127.0.0.1 $(echo $names | tr , ' ')" >>"$files/hosts"
machine critest mount --bind "$files/hosts" /etc/hosts
rm -f "$out/repos.yaml"
machine critest "$out/bin/images" -programs "$out/bin" -list "$here/images.txt" -repos "$out/repos.yaml" \
    -listen 127.0.0.1:443 -names $names -certificate "$out/registry.pem" >"$out/registry.log" 2>&1 &
registry=$!
until [ -s "$out/repos.yaml" ]; do
    kill -0 "$registry" || { cat "$out/registry.log" >&2; exit 1; }
    sleep 0.2
done
(machine critest env SSL_CERT_FILE="$out/registry.pem" "$skiff" runtime >"$out/runtime.log" 2>&1 </dev/null) &
runtime=$!
endpoint=unix:///run/skiff-runtime/cri.sock
until machine critest "$out/bin/crictl" --runtime-endpoint "$endpoint" version >"$out/crictl.log" 2>&1; do
    kill -0 "$runtime" || { cat "$out/runtime.log" >&2; exit 1; }
    sleep 0.2
done
# As users ask for the state of a machine.
for question in info pods ps images stats statsp; do
    machine critest "$out/bin/crictl" --runtime-endpoint "$endpoint" --image-endpoint "$endpoint" "$question" >>"$out/crictl.log" 2>&1 || {
        cat "$out/crictl.log" >&2
        exit 1
    }
done
echo "crictl asks; critest begins"
status=0
machine critest "$out/bin/critest" --runtime-endpoint "$endpoint" --image-endpoint "$endpoint" \
    --ginkgo.no-color ${FOCUS:+--ginkgo.focus="$FOCUS"} --ginkgo.skip="$skip" >"$out/critest.log" 2>&1 || status=$?
sed -n '/^Summarizing/,$p; /^Ran [0-9]* of/,$p' "$out/critest.log" | sort -u
echo "the whole log is in $out/critest.log"
exit "$status"
