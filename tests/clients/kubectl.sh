#!/bin/sh
# One kubectl against the cluster of KUBECONFIG: kubectl.sh BINARY
set -eu
. "$(dirname "$0")/lib.sh"
kubectl=$1
namespace=kubectl-$$
work=$(mktemp -d)
trap '"$kubectl" delete namespace "$namespace" --wait=false >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
k() { "$kubectl" --namespace "$namespace" "$@"; }

"$kubectl" version
k create namespace "$namespace"
cat >"$work/map.yaml" <<'Y'
apiVersion: v1
kind: ConfigMap
metadata: {name: one, labels: {app: web}}
data: {a: "1", b: "1"}
Y
is "configmap/one created" k apply -f "$work/map.yaml"
is "configmap/one unchanged" k apply -f "$work/map.yaml"
sed -i 's/, b: "1"//' "$work/map.yaml"
is "configmap/one configured" k apply -f "$work/map.yaml"
is '{"a":"1"}' k get configmap one -o 'jsonpath={.data}'
is "configmap/one labeled" k label configmap one tier=front
is "one" k get configmap -l tier=front -o 'jsonpath={.items[*].metadata.name}'
is "configmap/one patched" k patch configmap one --type json -p '[{"op":"add","path":"/data/j","value":"1"}]'
is "configmap/two serverside-applied" sh -c "sed 's/name: one/name: two/' '$work/map.yaml' | '$kubectl' --namespace $namespace apply --server-side -f -"
is "configmap/two" k get configmap two -o name
k create deployment web --image=example.invalid/web:1 --replicas=0
is "deployment.apps/web scaled" k scale deployment web --replicas=1
is "deployment.apps/web image updated" k set image deployment/web web=example.invalid/web:2
k explain deployment.spec.replicas | grep -q "Number of desired pods" || fail "explain"
k get all >/dev/null || fail "get all"
k describe deployment web | grep -q "example.invalid/web:2" || fail "describe"
if k get configmap missing 2>"$work/error"; then fail "a missing object was found"; fi
grep -q '(NotFound): configmaps "missing" not found' "$work/error" || fail "$(cat "$work/error")"
if echo '{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x"},"colour":1}' | k apply -f - 2>"$work/error"; then
    fail "an unknown field was taken"
fi
grep -q "colour" "$work/error" || fail "$(cat "$work/error")"
is "yes" k auth can-i create pods
k api-resources | grep -q '^configmaps  *cm ' || fail "api-resources"
is 'configmap "one" deleted' sh -c "'$kubectl' --namespace $namespace delete configmap one | sed 's/ from .*//'"
k delete deployment web
if k get deployment web 2>/dev/null; then fail "the deployment is still there"; fi
