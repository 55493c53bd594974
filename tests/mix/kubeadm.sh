# Upstream's kubelet with containerd joins a skiff server by `kubeadm join`: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-node
skiff_machines=mix-server
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge
archive=$(busybox_archive)
machine mix-server "$skiff" image import "$archive"

# The other machine: containerd, as its package installs it, with what no registry brings here.
fresh_files mix-node
files=$machines_folder/mix-node/files
image_archive "$work/pause.tar" "$pause" '["sleep", "2147483647"]'
mkdir -p "$files/opt/cni" "$files/etc/cni/net.d" "$files/etc/containerd"
ln -s /usr/lib/cni "$files/opt/cni/bin"
# CAP_SYS_RESOURCE may be missing: then oom_score_adj can only be raised.
cat >"$files/etc/containerd/config.toml" <<TOML
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "$pause"
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
TOML
background mix-node containerd containerd
wait_until "containerd answers" machine mix-node ctr version
for one in "$archive" "$work/pause.tar"; do
    machine mix-node ctr --namespace k8s.io image import "$one" >/dev/null
done
# As the documents of kubeadm ask for it.
machine mix-node sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'

# What a user types. Patched and ignored is what this machine has not: systemd for cgroups, cgroups of version 2, and a
# kernel configuration that can be read.
mkdir "$files/patches"
cat >"$files/patches/kubeletconfiguration0+merge.yaml" <<YAML
cgroupDriver: cgroupfs
failCgroupV1: false
YAML
line=$(machine mix-server "$skiff" token create --kubeadm)
echo "$line"
# shellcheck disable=SC2086
background mix-node kubeadm $line --patches "$files/patches" --ignore-preflight-errors=SystemVerification
kubeadm=$!
# Without systemd kubeadm starts no service: this is what kubelet.service runs with kubeadm's drop-in.
flags=$files/var/lib/kubelet/kubeadm-flags.env
until [ -s "$flags" ]; do
    kill -0 "$kubeadm" 2>/dev/null || {
        cat "$work/kubeadm.log" >&2
        exit 1
    }
    sleep 0.1
done
background mix-node kubelet sh -c '
    . /var/lib/kubelet/kubeadm-flags.env
    exec kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
        --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS'
wait "$kubeadm" || {
    cat "$work/kubeadm.log" >&2
    exit 1
}
says "This node has joined the cluster" cat "$work/kubeadm.log"
cat "$work/kubeadm.log"

# The network of that machine, as its administrator chooses it: the bridge plugin, and a route to the other node's pods.
has_pods() { says / kubectl get node mix-node -o 'jsonpath={.spec.podCIDR}'; }
wait_until "the Node has a pod network" has_pods
cat >"$files/etc/cni/net.d/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "mix", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(kubectl get node mix-node -o 'jsonpath={.spec.podCIDR}')"}]],
            "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
machine mix-node ip route add "$(kubectl get node mix-server -o 'jsonpath={.spec.podCIDR}')" via "$(machine_address mix-server)"
wait_until "the Node is Ready" node_is_ready mix-node
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
