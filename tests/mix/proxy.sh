# Upstream's kube-proxy in place of skiff's: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-one
skiff_machines=mix-one
admin="mix-one $machines_folder/mix-one/lib/skiff/admin.kubeconfig"
machine mix-one "$skiff" up --no-kubeconfig-merge --components api,controllers,scheduler,node,dns
machine mix-one "$skiff" image import "$(busybox_archive)"
workload web mix-one
workload client mix-one
if answers client web >/dev/null; then
    echo "the service answers without a proxy" >&2
    exit 1
fi
kube_proxy mix-one mix-one
wait_until "a pod reaches a service by upstream's kube-proxy" answers client web
wait_until "a pod reaches its own service" answers web web
wait_until "a pod reaches a service by its name" resolves client web
kubectl patch service web --patch '{"spec": {"type": "NodePort"}}'
port=$(kubectl get service web -o 'jsonpath={.spec.ports[0].nodePort}')
wait_until "the machine reaches a node port" \
    says "this is web" machine mix-one curl -sS --max-time 5 "http://$(machine_address mix-one):$port/"
wait_until "a pod reaches the API server by its service" \
    kubectl exec deployment/client -- sh -c 'nc -w 5 "$KUBERNETES_SERVICE_HOST" 443 </dev/null'
