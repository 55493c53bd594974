#!/bin/sh
# sample-device-plugin.sh DIR: upstream's sample device plugin, built by Go from its module into DIR/bin. What is there
# already is left alone.
set -eu
dir=${1:?usage: sample-device-plugin.sh DIR}
kubernetes=v1.36.4
staging=v0.36.4
export CGO_ENABLED=0
mkdir -p "$dir/bin" "$dir/src/sample-device-plugin"

if [ ! -x "$dir/bin/sample-device-plugin" ]; then
    (
        cd "$dir/src/sample-device-plugin"
        rm -f go.mod go.sum
        go mod init sample-device-plugin >/dev/null 2>&1
        # As tools/upstream.sh: Kubernetes' own libraries are taken from where they are published.
        source=$(go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
        go mod edit -require="k8s.io/kubernetes@$kubernetes"
        for library in $(sed -n 's|^[[:space:]]*\(k8s.io/[a-z-]*\) => ./staging/.*|\1|p' "$source"); do
            go mod edit -replace="$library=$library@$staging"
        done
        go build -mod=mod -ldflags "-s -w" -o ../../bin/ k8s.io/kubernetes/test/images/sample-device-plugin
    )
fi
