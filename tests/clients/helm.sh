#!/bin/sh
# Helm 4 against the cluster of KUBECONFIG: helm.sh HELM KUBECTL
# Install, upgrade, a failed upgrade, a conflict, rollback, test, uninstall, with server-side apply and waiting.
set -eu
. "$(dirname "$0")/lib.sh"
helm=$1
kubectl=$2
chart=$(cd "$(dirname "$0")/helm/chart" && pwd)
namespace=helm-$$
work=$(mktemp -d)
trap '"$kubectl" delete namespace "$namespace" --wait=false >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
h() { "$helm" --namespace "$namespace" "$@" --timeout 120s; }
k() { "$kubectl" --namespace "$namespace" "$@"; }
# refused TEXT COMMAND...: the command fails and says so
refused() {
    text=$1
    shift
    if "$@" >"$work/said" 2>&1; then fail "$* was taken"; fi
    grep -qF -- "$text" "$work/said" || fail "$*: $(cat "$work/said")"
}

"$helm" version
h install web "$chart" --create-namespace --wait
is 1 k get deployment web -o 'jsonpath={.status.readyReplicas}'
is 3 k get widget web -o 'jsonpath={.spec.size}'
h upgrade web "$chart" --set text=two,replicas=2 --wait
is 2 k get deployment web -o 'jsonpath={.status.readyReplicas}'
is "two helm Apply" k get configmap web -o \
    'jsonpath={.data.text} {.metadata.managedFields[*].manager} {.metadata.managedFields[*].operation}'
refused 'ConfigMap "Bad_Name" is invalid: metadata.name: Invalid value' h upgrade web "$chart" --set bad=true
k patch deployment web -p '{"spec":{"replicas":3}}'
refused 'conflict with "kubectl-patch"' h upgrade web "$chart" --set replicas=1
h upgrade web "$chart" --set text=three,replicas=1 --force-conflicts --wait
is three k get configmap web -o 'jsonpath={.data.text}'
h rollback web 2 --wait
is two k get configmap web -o 'jsonpath={.data.text}'
h test web
h uninstall web --wait
is "" k get deployments,widgets,secrets -o name
# Client-side apply, as Helm 3 does it.
h install old "$chart" --server-side=false --skip-crds
h upgrade old "$chart" --server-side=false --set text=new
is new k get configmap old -o 'jsonpath={.data.text}'
h uninstall old
