#!/bin/sh
# upstream.sh DIR: kube-apiserver, kube-controller-manager, kube-scheduler and etcd, built by Go from their
# modules into DIR/bin, to measure beside. What is there already is left alone.
set -eu
dir=${1:?usage: upstream.sh DIR}
kubernetes=v1.36.4
staging=v0.36.4
etcd=v3.6.8
# As tests/conformance builds it, so that both share the compiler's cache.
export CGO_ENABLED=0
mkdir -p "$dir/bin" "$dir/src"
cd "$dir/src"

# As a dependency of a module of ours: `go install` refuses a module with replace directives, which etcd's has.
if [ ! -x ../bin/etcd ]; then
    mkdir -p etcd
    (
        cd etcd
        rm -f go.mod go.sum
        go mod init etcd-build >/dev/null 2>&1
        go get "go.etcd.io/etcd/server/v3@$etcd"
        go build -ldflags "-s -w" -o ../../bin/etcd go.etcd.io/etcd/server/v3
    )
fi

missing=""
for name in kube-apiserver kube-controller-manager kube-scheduler; do
    [ -x "../bin/$name" ] || missing="$missing k8s.io/kubernetes/cmd/$name"
done
[ -n "$missing" ] || exit 0

# The module of Kubernetes takes its own libraries from folders of its source tree; a module that depends
# on it has to say where they are published.
rm -f go.mod go.sum
go mod init upstream >/dev/null 2>&1
source=$(go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
go mod edit -require="k8s.io/kubernetes@$kubernetes"
for library in $(sed -n 's|^[[:space:]]*\(k8s.io/[a-z-]*\) => ./staging/.*|\1|p' "$source"); do
    go mod edit -replace="$library=$library@$staging"
done
version="-X k8s.io/component-base/version.gitVersion=$kubernetes"
# shellcheck disable=SC2086
go build -mod=mod -ldflags "-s -w $version" -o ../bin/ $missing
