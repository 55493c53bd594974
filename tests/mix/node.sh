# `make bench-node`: pods on a machine that joined by `skiff join`, and on one with upstream's kubelet and containerd, of one cluster, in
# turns. Prints how long pods take, what they cost, and the memory of what looks after them. ROUNDS pods one after the
# other, then a Deployment of PODS: see run.sh.
. "$(dirname "$0")/lib.sh"

start mix-server mix-skiff mix-upstream
skiff_machines="mix-server mix-skiff"
admin="mix-server $machines_folder/mix-server/lib/skiff/admin.kubeconfig"
machine mix-server "$skiff" up --no-kubeconfig-merge --components api,controllers,scheduler >"$work/up.log"
archive=$(busybox_archive)
# shellcheck disable=SC2046
machine mix-skiff "$skiff" $(machine mix-server "$skiff" token create | sed -n 's/^skiff //p') >"$work/join.log"
machine mix-skiff "$skiff" image import "$archive"
containerd_on mix-upstream "$archive"
join_kubelet mix-upstream mix-server
wait_until "skiff's Node is Ready" node_is_ready mix-skiff
background mix-server proxy env KUBECONFIG="${admin#* }" kubectl proxy --port 8001
wait_until "the API answers" machine mix-server curl -fsS http://127.0.0.1:8001/readyz
# In the server's network, and where the cgroups of all machines are seen.
machines_enter mix-server --net python3 "$(dirname "$0")/pods.py" http://127.0.0.1:8001 "$busybox" "${ROUNDS:-30}" "${PODS:-100}" mix-skiff mix-upstream
echo
kubectl get pods -l round=last --field-selector spec.nodeName=mix-skiff -o name | while read -r pod; do
    machine mix-server "$skiff" trace "$pod"
done
