#!/bin/sh
# Cluster DNS under load, and the real CoreDNS, built by Go from its module, under the same: queries a second, CPU a query,
# memory. SERVICES and SECONDS choose how many and how long; COREDNS is its binary, or `no`.
set -eu
cd "$(dirname "$0")/.."
# As kubeadm v1.36 installs it.
version=v1.14.2
coredns=${COREDNS:-}
if [ -z "$coredns" ] && command -v go >/dev/null; then
    coredns=$PWD/target/coredns-$version
    if [ ! -x "$coredns" ]; then
        module=$(go mod download -json "github.com/coredns/coredns@$version" | sed -n 's/.*"Dir": "\(.*\)",/\1/p')
        # The folder of a module is read-only, and a build may write its go.sum: build a copy.
        copy=$(mktemp -d)
        cp -r "$module/." "$copy"
        chmod -R u+w "$copy"
        (cd "$copy" && CGO_ENABLED=0 go build -o "$coredns" .)
        rm -rf "$copy"
    fi
fi
[ -n "$coredns" ] || coredns=no
${CARGO:-cargo} run ${PROFILE---release} --package skiff-dns --features bench --bin bench-dns -- \
    "${SERVICES:-5000}" "${SECONDS:-10}" "$coredns"
