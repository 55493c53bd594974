#!/bin/sh
# Runs the client tests of each folder against a fresh cluster, and takes it down again.
# usage: run.sh SKIFF [python|javascript|go|rust|kubectl|helm ...]
set -eu
skiff=$(realpath "$1")
shift
here=$(cd "$(dirname "$0")" && pwd)
work=$(cd "$here/../.." && pwd)/target/clients
mkdir -p "$work"
name=clients-$$
data=$(mktemp -d "$work/data.XXXXXX")
trap '"$skiff" down --name "$name" --data-dir "$data" --delete >/dev/null 2>&1 || true; rm -rf "$data"' EXIT
trap 'exit 130' INT TERM

# Clients keep what they know of a cluster at home, which is therefore a new one; tools stay where they are.
export RUSTUP_HOME="${RUSTUP_HOME:-$HOME/.rustup}" CARGO_HOME="${CARGO_HOME:-$HOME/.cargo}"
export GOPATH="${GOPATH:-$HOME/go}" GOCACHE="${GOCACHE:-$HOME/.cache/go-build}"
export HOME="$data/home"
mkdir -p "$HOME"
"$skiff" up --name "$name" --data-dir "$data" >"$data/up.log" 2>&1 || { cat "$data/up.log"; exit 1; }
export KUBECONFIG="$data/admin.kubeconfig"

python() {
    [ -x "$work/venv/bin/python" ] || python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q -r "$here/python/requirements.txt"
    "$work/venv/bin/python" "$here/python/test_client.py"
}
javascript() {
    mkdir -p "$work/javascript"
    cp "$here/javascript/package.json" "$here/javascript/client.test.mjs" "$work/javascript/"
    (cd "$work/javascript" && npm install --silent --no-audit --no-fund && node --test client.test.mjs)
}
go() {
    (cd "$here/go" && GOFLAGS=-mod=mod command go test -count=1 ./...)
}
rust() {
    CARGO_TARGET_DIR="$work/rust" cargo run --quiet --manifest-path "$here/rust/Cargo.toml"
}
kubectl() {
    # A kubectl that does not know its version cannot compare it with the server's.
    (cd "$here/../conformance" && version=$(command go list -m -f '{{.Version}}' k8s.io/kubernetes) &&
        command go build -ldflags "-X k8s.io/component-base/version.gitVersion=$version" \
            -o "$work/kubectl-1.36" k8s.io/kubernetes/cmd/kubectl)
    old=$(sh "$here/../../tools/debian-kubectl.sh")
    for binary in "$old" "$(command -v kubectl)" "$work/kubectl-1.36"; do
        sh "$here/kubectl.sh" "$binary"
    done
}
helm() {
    (cd "$here/helm" && command go build -o "$work/helm-4" helm.sh/helm/v4/cmd/helm)
    sh "$here/helm.sh" "$work/helm-4" "$(command -v kubectl)"
}

failed=0
for suite in ${*:-python javascript go rust kubectl helm}; do
    if ("$suite") >"$data/$suite.log" 2>&1; then
        echo "$suite: passed"
    else
        failed=1
        cat "$data/$suite.log"
        echo "$suite: FAILED"
    fi
done
exit $failed
