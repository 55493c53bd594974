# Upstream's sample device plugin and the example driver of dynamic resources on a skiff node: see run.sh.
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
says Running kubectl get pod plugin -o 'jsonpath={.status.phase}' >/dev/null
pod second "" 'resources: {limits: {example.com/resource: "1"}}'
wait_until "another pod gets the other device" says Running kubectl get pod second -o 'jsonpath={.status.phase}'

background mix-one dra-example-kubeletplugin dra-example-kubeletplugin --node-name mix-one --num-devices 2 \
    --cdi-root /run/cdi --kubelet-registrar-directory-path "$kubelet/plugins_registry" \
    --kubelet-plugins-directory-path "$kubelet/plugins" --kubeconfig "$machines_folder/mix-one/lib/skiff/admin.kubeconfig"
wait_until "the driver offers its devices" says gpu.example.com kubectl get resourceslices -o 'jsonpath={.items[*].spec.driver}'
kubectl apply -f - <<YAML
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu.example.com}
spec:
  extendedResourceName: example.com/gpu
  selectors: [{cel: {expression: "device.driver == 'gpu.example.com'"}}]
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.example.com}}]}}}
YAML
pod claim 'resourceClaims: [{name: gpu, resourceClaimTemplateName: one}]' 'resources: {claims: [{name: gpu}]}'
wait_until "a pod with a claim runs" says Running kubectl get pod claim -o 'jsonpath={.status.phase}'
wait_until "it has the driver's device" logs_env claim GPU_DEVICE_
pod extended "" 'resources: {limits: {example.com/gpu: "1"}}'
wait_until "a pod with an extended resource of the class runs" says Running kubectl get pod extended -o 'jsonpath={.status.phase}'
wait_until "it has the driver's other device" logs_env extended GPU_DEVICE_
kubectl delete pod claim extended --wait=true
no_claims() { [ -z "$(kubectl get resourceclaims -o name)" ]; }
wait_until "the claims are gone with their pods" no_claims
kubectl delete pod plugin second --wait=true
rm -rf /tmp/Dev-1 /tmp/Dev-2
