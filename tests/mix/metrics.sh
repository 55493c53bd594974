# The real metrics-server, installed by its own chart as users do it, takes over from skiff's Metrics API: it reads both nodes with the
# token of its service account, and kubectl and an autoscaler get its figures. See run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-node
skiff_machines="mix-server mix-node"
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge
# shellcheck disable=SC2046
machine mix-node "$skiff" $(machine mix-server "$skiff" token create | sed -n 's/^skiff //p')
image=mix.local/metrics-server
program_archive "$work/metrics-server.tar" "$image:1" "$(command -v metrics-server)"
archive=$(busybox_archive)
for one in $skiff_machines; do
    machine "$one" "$skiff" image import "$work/metrics-server.tar"
    machine "$one" "$skiff" image import "$archive"
done
chart=$(dirname "$(command -v metrics-server)")/../charts/metrics-server
# The folders of Helm are those of a user, who has none here.
helm() {
    machine mix-server env KUBECONFIG="${admin#* }" HOME="$work" helm --namespace kube-system "$@" --wait --timeout "${patience}s"
}
serves() { says "$1" kubectl get apiservice v1beta1.metrics.k8s.io -o 'jsonpath={.spec.service.name}-{.status.conditions[0].status}'; }
tells() { says "$1" kubectl top "$2" --no-headers; }

wait_until "skiff's own Metrics API" serves -True
workload busy mix-node
helm install metrics-server "$chart" --set-string "image.repository=$image,image.tag=1"
wait_until "requests go to metrics-server" serves metrics-server-True
kubectl get --raw /apis/metrics.k8s.io/v1beta1/nodes | grep -q '"kind":"NodeMetricsList"'
wait_until "it has read the server" tells mix-server node
wait_until "it has read the node that joined" tells mix-node node
wait_until "it has read a pod" tells busy- pod
if machine mix-server env KUBECONFIG="${admin#* }" kubectl -n kube-system logs deployment/metrics-server | grep -E 'Failed to scrape|x509|Unauthorized|Forbidden'; then
    echo "metrics-server complains" >&2
    exit 1
fi

# An autoscaler sees the load: the pod is busy, and asked for little.
kubectl set resources deployment busy --requests=cpu=10m
kubectl rollout status deployment/busy --timeout="${patience}s"
kubectl autoscale deployment busy --min=1 --max=3 --cpu-percent=50
kubectl exec deployment/busy -- sh -c '(while :; do :; done) >/dev/null 2>&1 &'
scaled() { says 3 kubectl get deployment busy -o 'jsonpath={.spec.replicas}'; }
wait_until "the autoscaler follows its figures" scaled

helm uninstall metrics-server
wait_until "skiff's own Metrics API again" serves -True
wait_until "which tells of both nodes" tells mix-node node
