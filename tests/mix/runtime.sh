# Upstream's kubelet runs its pods on skiff's embedded runtime (`skiff runtime`): see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-node
skiff_machines=mix-server
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge

fresh_files mix-node
background mix-node runtime "$skiff" runtime
wait_until "the runtime serves CRI" machine mix-node test -S /run/skiff-runtime/cri.sock
machine mix-node "$skiff" runtime --import "$(busybox_archive)"

join_kubelet mix-node mix-server --cri-socket unix:///run/skiff-runtime/cri.sock
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
