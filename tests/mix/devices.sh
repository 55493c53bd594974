# Upstream's sample device plugin on a skiff node: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-one
skiff_machines=mix-one
admin="mix-one $machines_folder/mix-one/lib/skiff/admin.kubeconfig"
kubelet=/var/lib/skiff/skiff/kubelet
# The programs have upstream's places built in.
mkdir -p /var/lib/kubelet /run/cdi "$work/cdi"
machine mix-one sh -ec 'mkdir -p "$1"; mount --bind "$1" /var/lib/kubelet; mount --bind "$2" /run/cdi' \
    devices "$kubelet" "$work/cdi"
machine mix-one "$skiff" up --no-kubeconfig-merge --components api,controllers,scheduler,node
machine mix-one "$skiff" image import "$(busybox_archive)"

# pod NAME SPEC…: a pod of one container; the rest is added to its spec and its container.
pod() {
    kubectl apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  terminationGracePeriodSeconds: 0
  restartPolicy: Never
  $2
  containers:
  - name: c
    image: $busybox
    command: [sh, -c, 'echo started; exec sleep 100000']
    $3
YAML
}

logs_env() {
    says "$2" kubectl exec "$1" -- sh -c 'cat /proc/1/environ | tr "\0" "\n"'
}

background mix-one sample-device-plugin env PLUGIN_SOCK_DIR=/var/lib/kubelet/device-plugins CDI_ENABLED=1 sample-device-plugin
wait_until "the node has the sample plugin's devices" \
    says 2 kubectl get node mix-one -o 'jsonpath={.status.allocatable.example\.com/resource}'
pod plugin "" 'resources: {limits: {example.com/resource: "1"}}'
wait_until "a pod with a device of the plugin runs" says Running kubectl get pod plugin -o 'jsonpath={.status.phase}'
wait_until "it has what the plugin says by CDI" logs_env plugin CDI_DEVICE=CDI-Dev-
wait_until "it has the plugin's mount" kubectl exec plugin -- sh -c 'ls /tmp/Dev-*'
machine mix-one "$skiff" down
machine mix-one "$skiff" up --no-kubeconfig-merge --components api,controllers,scheduler,node
wait_until "the plugin registers with the next kubelet" \
    says 2 kubectl get node mix-one -o 'jsonpath={.status.allocatable.example\.com/resource}'
wait_until "the pod goes on running" says Running kubectl get pod plugin -o 'jsonpath={.status.phase}'
pod second "" 'resources: {limits: {example.com/resource: "1"}}'
wait_until "another pod gets the other device" says Running kubectl get pod second -o 'jsonpath={.status.phase}'

kubectl delete pod plugin second --wait=true
rm -rf /tmp/Dev-1 /tmp/Dev-2
