# Upstream's kubelet with containerd joins a skiff server by `kubeadm join`: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-node
skiff_machines=mix-server
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge
archive=$(busybox_archive)
machine mix-server "$skiff" image import "$archive"

containerd_on mix-node "$archive"
join_kubelet mix-node mix-server
cat "$work/kubeadm.log"
machine mix-node ip route add "$(kubectl get node mix-server -o 'jsonpath={.spec.podCIDR}')" via "$(machine_address mix-server)"
kubectl get nodes -o wide
kube_proxy mix-node mix-node

workload there mix-node
workload here mix-server
wait_until "logs of upstream's kubelet by skiff's API server" says "serving there" kubectl logs deployment/there
wait_until "exec there" says 42 kubectl exec deployment/there -- sh -c 'echo $((6 * 7))'
wait_until "from a pod of skiff's node to a service of upstream's" answers here there
wait_until "from a pod of upstream's node to a service of skiff's" answers there here
wait_until "the name of a service on skiff's node" resolves here there
wait_until "the name of a service on upstream's node" resolves there here
kubectl cordon mix-node
kubectl delete deployment there --wait=true
gone() { [ -z "$(kubectl get pods -l app=there -o name)" ]; }
wait_until "the pod is gone" gone
