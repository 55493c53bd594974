# skiff's agent joins upstream's control plane, as kubeadm sets it up: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-plane mix-agent
fresh_files mix-plane
files=$machines_folder/mix-plane/files
address=$(machine_address mix-plane)
cat >"$files/kubeadm.yaml" <<YAML
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint: {advertiseAddress: $address}
nodeRegistration: {name: mix-plane, criSocket: "unix:///run/containerd/containerd.sock"}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.36.4
controlPlaneEndpoint: $address:6443
networking: {podSubnet: 10.244.0.0/16, serviceSubnet: 10.96.0.0/16}
YAML
phase() {
    machine mix-plane kubeadm init phase "$@" --config "$files/kubeadm.yaml" >>"$work/kubeadm.log" 2>&1 || {
        cat "$work/kubeadm.log" >&2
        exit 1
    }
}
phase certs all
phase kubeconfig all
phase etcd local
phase control-plane all
# No kubelet runs here: the programs run by the commands of their static pods.
for program in etcd kube-apiserver kube-controller-manager kube-scheduler; do
    sed -n '/^  - command:/,/^    image:/s/^    - //p' "$files/etc/kubernetes/manifests/$program.yaml" >"$work/$program.command"
    # shellcheck disable=SC2046
    background mix-plane "$program" $(cat "$work/$program.command")
done
admin="mix-plane /etc/kubernetes/super-admin.conf"
wait_until "upstream's API server is ready" kubectl get --raw /readyz
phase upload-config all
phase bootstrap-token
line=$(machine mix-plane kubeadm token create --print-join-command --kubeconfig /etc/kubernetes/super-admin.conf 2>>"$work/kubeadm.log")
echo "$line"
# Its controllers lead a while after their start.
wait_until "upstream's controllers sign for the token" \
    says jws-kubeconfig- kubectl -n kube-public get configmap cluster-info -o yaml

# Upstream's nodes may read less than skiff's network needs; the join says what to do about it.
# shellcheck disable=SC2086
join() { machine mix-agent "$skiff" ${line#kubeadm } "$@"; }
if said=$(join 2>&1); then
    echo "it joined without its roles" >&2
    exit 1
fi
says "skiff node-roles | kubectl apply -f -" echo "$said"
"$skiff" node-roles | kubectl apply -f -
skiff_machines=mix-agent
join
machine mix-agent "$skiff" image import "$(busybox_archive)"
wait_until "the Node is Ready" node_is_ready mix-agent
kubectl get nodes -o wide
workload web mix-agent
workload client mix-agent
wait_until "logs of skiff's kubelet by upstream's API server" says "serving web" kubectl logs deployment/web
wait_until "exec there" says 42 kubectl exec deployment/web -- sh -c 'echo $((6 * 7))'
wait_until "a pod reaches a service by skiff's proxy" answers client web
wait_until "a pod reaches the API server by its service" \
    kubectl exec deployment/client -- sh -c 'nc -w 5 "$KUBERNETES_SERVICE_HOST" 443 </dev/null'
# The agent's own DNS, behind the service that CoreDNS has elsewhere.
gateway=$(kubectl get node mix-agent -o 'jsonpath={.spec.podCIDR}' | sed 's|\.0/.*|.1|')
kubectl apply -f - <<YAML
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: 10.96.0.10
  ports: [{name: dns, port: 53, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns-agent, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [$gateway]}]
ports: [{name: dns, port: 53, protocol: UDP}]
YAML
wait_until "a pod reaches a service by its name" resolves client web
machine mix-agent "$skiff" down
machine mix-agent "$skiff" up
wait_until "exec after a restart of the agent" says 42 kubectl exec deployment/web -- sh -c 'echo $((6 * 7))'
kubectl delete deployment web client --wait=true
machine mix-agent "$skiff" leave
skiff_machines=""
kubectl delete node mix-agent
