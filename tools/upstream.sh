#!/bin/sh
# upstream.sh DIR [NAME…]: upstream's programs, built by Go from their modules into DIR/bin: etcd, flanneld, helm, metrics-server
# (with its chart in DIR/charts) and the commands
# of Kubernetes that are named (kubelet, kubeadm, kube-proxy, …); without names a control plane, to measure beside.
# What is there already is left alone.
set -eu
dir=${1:?usage: upstream.sh DIR [NAME…]}
shift
[ $# -gt 0 ] || set -- etcd kube-apiserver kube-controller-manager kube-scheduler
kubernetes=v1.36.4
staging=v0.36.4
etcd=v3.6.8
flannel=v0.26.7
metrics_server=v0.9.0
here=$(cd "$(dirname "$0")" && pwd)
# As tests/conformance builds it, so that both share the compiler's cache.
export CGO_ENABLED=0
mkdir -p "$dir/bin" "$dir/src"
cd "$dir/src"

# As a dependency of a module of ours: `go install` refuses a module with replace directives, which etcd's has.
build_etcd() {
    mkdir -p etcd
    (
        cd etcd
        rm -f go.mod go.sum
        go mod init etcd-build >/dev/null 2>&1
        go get "go.etcd.io/etcd/server/v3@$etcd"
        go build -ldflags "-s -w" -o ../../bin/etcd go.etcd.io/etcd/server/v3
    )
}

# flannel's UDP backend is C.
build_flanneld() {
    mkdir -p flannel
    (
        cd flannel
        rm -f go.mod go.sum
        go mod init flannel-build >/dev/null 2>&1
        go get "github.com/flannel-io/flannel@$flannel"
        CGO_ENABLED=1 go build -ldflags "-s -w" -o ../../bin/flanneld github.com/flannel-io/flannel
    )
}

build_metrics_server() {
    mkdir -p metrics-server ../charts
    (
        cd metrics-server
        rm -f go.mod go.sum
        go mod init metrics-server-build >/dev/null 2>&1
        go get "sigs.k8s.io/metrics-server/cmd/metrics-server@$metrics_server"
        go build -ldflags "-s -w" -o ../../bin/metrics-server sigs.k8s.io/metrics-server/cmd/metrics-server
        cp -r --no-preserve=mode "$(go list -m -f '{{.Dir}}' sigs.k8s.io/metrics-server)/charts/metrics-server" ../../charts/
    )
}

# Where its version is pinned already.
build_helm() {
    bin=$(cd ../bin && pwd)
    (cd "$here/../tests/clients/helm" && go build -ldflags "-s -w" -o "$bin/helm" helm.sh/helm/v4/cmd/helm)
}

missing=""
for name in "$@"; do
    if [ ! -x "../bin/$name" ]; then
        case $name in
            etcd) build_etcd ;;
            flanneld) build_flanneld ;;
            helm) build_helm ;;
            metrics-server) build_metrics_server ;;
            *) missing="$missing k8s.io/kubernetes/cmd/$name" ;;
        esac
    fi
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
