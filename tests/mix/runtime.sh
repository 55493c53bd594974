# Upstream's kubelet runs its pods on skiff's embedded runtime (`skiff runtime`): see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-node
skiff_machines=mix-server
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge

fresh_files mix-node
files=$machines_folder/mix-node/files
mkdir -p "$files/opt/cni" "$files/etc/cni/net.d"
ln -s /usr/lib/cni "$files/opt/cni/bin"
machine mix-node sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'
background mix-node runtime "$skiff" runtime
wait_until "the runtime serves CRI" machine mix-node test -S /run/skiff-runtime/cri.sock
machine mix-node "$skiff" runtime --import "$(busybox_archive)"

# What a user types, but for what this machine has not: see kubeadm.sh.
mkdir "$files/patches"
cat >"$files/patches/kubeletconfiguration0+merge.yaml" <<YAML
cgroupDriver: cgroupfs
failCgroupV1: false
# A disk that is full of builds is no matter here.
evictionHard: {memory.available: 10Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%, imagefs.inodesFree: 1%}
YAML
line=$(machine mix-server "$skiff" token create --kubeadm)
echo "$line --cri-socket unix:///run/skiff-runtime/cri.sock"
# shellcheck disable=SC2086
background mix-node kubeadm $line --cri-socket unix:///run/skiff-runtime/cri.sock --patches "$files/patches" \
    --ignore-preflight-errors=SystemVerification
kubeadm=$!
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
has_pods() { says / kubectl get node mix-node -o 'jsonpath={.spec.podCIDR}'; }
wait_until "the Node has a pod network" has_pods
cat >"$files/etc/cni/net.d/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "mix", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(kubectl get node mix-node -o 'jsonpath={.spec.podCIDR}')"}]],
            "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
wait_until "the Node is Ready" node_is_ready mix-node
wait_until "it says that it has user namespaces" says '"userNamespaces":true' \
    kubectl get node mix-node -o 'jsonpath={.status.runtimeHandlers}'
kubectl get nodes -o wide
workload web mix-node
wait_until "logs by skiff's API server" says "serving web" kubectl logs deployment/web
wait_until "exec" says 42 kubectl exec deployment/web -- sh -c 'echo $((6 * 7))'
wait_until "the kubelet's figures of the pod" says 'web-' kubectl get --raw /api/v1/nodes/mix-node/proxy/stats/summary

kubectl apply -f - <<YAML
apiVersion: v1
kind: ConfigMap
metadata: {name: words}
data: {word: hello}
---
apiVersion: v1
kind: Pod
metadata: {name: users}
spec:
  hostUsers: false
  nodeSelector: {kubernetes.io/hostname: mix-node}
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
  volumes:
  - {name: words, configMap: {name: words}}
  - {name: empty, emptyDir: {}}
  containers:
  - name: c
    image: $busybox
    command: [sh, -c, 'cat /words/word && echo >/empty/file && echo " map" \$(cat /proc/self/uid_map) && sleep 10000']
    volumeMounts:
    - {name: words, mountPath: /words}
    - {name: empty, mountPath: /empty}
YAML
# Its root is one of the ids that no user of the machine has.
mapped() { kubectl "$@" | tee "$work/users" | grep -Eq '^(hello map )?0 [1-9][0-9]{4,9} 65536$'; }
wait_until "a pod in a user namespace reads and writes its volumes" mapped logs users
wait_until "exec in the user namespace" mapped exec users -- sh -c 'echo $(cat /proc/self/uid_map)'
kubectl delete pod users --wait=true
kubectl delete deployment web --wait=true
gone() { [ -z "$(kubectl get pods -l app=web -o name)" ]; }
wait_until "the pods are gone" gone
