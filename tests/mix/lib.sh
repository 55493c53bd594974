# What the scenarios of run.sh share. Source it with the scenario's own arguments: SKIFF-BINARY UPSTREAM-BIN FOLDER.

skiff=$1
# Upstream's programs find each other, as installed ones do.
PATH=$2:$PATH
export PATH
work=$3
mkdir -p "$work"
# shellcheck source=tools/machines.sh
. "$(dirname "$0")/../../tools/machines.sh"

busybox=mix.local/busybox:1
pause=mix.local/pause:1
# Seconds: a limit for what hangs, no measure of how fast anything is.
patience=${PATIENCE:-300}

# start MACHINE…: makes them, and has all of it removed when the script ends.
start() {
    # The kubelet sets these for the whole kernel.
    for file in vm/overcommit_memory kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
        [ ! -e "/proc/sys/$file" ] || echo "$file $(cat "/proc/sys/$file")" >>"$work/sysctls"
    done
    trap finish EXIT
    trap 'exit 130' INT TERM
    machines_start "$work/machines" "$@"
}

finish() {
    status=$?
    for name in ${skiff_machines:-}; do
        machine "$name" "$skiff" down --delete >/dev/null 2>&1 || true
    done
    machines_end
    while read -r file value; do
        echo "$value" >"/proc/sys/$file"
    done <"$work/sysctls"
    [ "$status" -eq 0 ] || echo "failed; the logs are in $work" >&2
}

# fresh_files MACHINE: gives it folders of its own where upstream's programs keep their files.
fresh_files() {
    machine "$1" sh -ec '
        mkdir -p "$1"
        cp -a /etc "$1/etc"
        for folder in etc opt run var/lib var/log; do
            mkdir -p "$1/$folder"
            mount --bind "$1/$folder" "/$folder"
        done
        echo "$2 $3" >>/etc/hosts' fresh_files "$machines_folder/$1/files" "$(machine_address "$1")" "$1"
}

# background MACHINE NAME COMMAND…: runs it there until the machine ends, with its output in a log of that name.
background() {
    where=$1
    log=$work/$2.log
    shift 2
    (machine "$where" "$@" >"$log" 2>&1 </dev/null) &
}

# wait_until WHAT COMMAND…: runs the command until it succeeds.
wait_until() {
    what=$1
    shift
    deadline=$(($(date +%s) + patience))
    until "$@" >"$work/answer" 2>&1; do
        if [ "$(date +%s)" -gt "$deadline" ]; then
            echo "gave up waiting: $what; the last answer:" >&2
            cat "$work/answer" >&2
            exit 1
        fi
        sleep 0.3
    done
    echo "ok: $what"
}

# says TEXT COMMAND…: whether the command succeeds and prints the text.
says() {
    wanted=$1
    shift
    said=$("$@" 2>&1) || { echo "$said"; return 1; }
    case $said in
        *"$wanted"*) ;;
        *) echo "not \"$wanted\": $said"; return 1 ;;
    esac
}

# As the administrator; `admin` is the machine and the kubeconfig.
kubectl() {
    # shellcheck disable=SC2086
    set -- $admin "$@"
    on=$1
    kubeconfig=$2
    shift 2
    machine "$on" env KUBECONFIG="$kubeconfig" kubectl "$@"
}

node_is_ready() {
    says True kubectl get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
}

# image_archive FILE REFERENCE COMMAND: an image with Debian's static busybox; the command is a JSON list.
image_archive() {
    folder=$(mktemp -d "$work/image.XXXXXX")
    mkdir -p "$folder/root/bin" "$folder/root/etc" "$folder/root/tmp"
    cp /bin/busybox "$folder/root/bin/"
    for applet in sh cat echo sleep httpd wget timeout nc mkdir; do
        ln -s busybox "$folder/root/bin/$applet"
    done
    tar -C "$folder/root" -cf "$folder/layer.tar" .
    layer=$(sha256sum "$folder/layer.tar" | cut -d' ' -f1)
    printf '{"architecture":"amd64","os":"linux","config":{"Env":["PATH=/bin"],"Cmd":%s},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$3" "$layer" >"$folder/config"
    config=$(sha256sum "$folder/config" | cut -d' ' -f1).json
    mv "$folder/config" "$folder/$config"
    printf '[{"Config":"%s","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$config" "$2" >"$folder/manifest.json"
    tar -C "$folder" -cf "$1" "$config" layer.tar manifest.json
    rm -r "$folder"
}

busybox_archive() {
    image_archive "$work/busybox.tar" "$busybox" '["sh"]'
    echo "$work/busybox.tar"
}

# workload NAME NODE: a Deployment of a web server on that node, and its Service.
workload() {
    kubectl apply -f - <<YAML
apiVersion: apps/v1
kind: Deployment
metadata: {name: $1}
spec:
  selector: {matchLabels: {app: $1}}
  template:
    metadata: {labels: {app: $1}}
    spec:
      nodeSelector: {kubernetes.io/hostname: $2}
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: $busybox
        command: [sh, -c, 'mkdir -p /tmp/www; echo "this is $1" >/tmp/www/index.html; echo serving $1; exec httpd -f -p 8080 -h /tmp/www']
        readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: $1}
spec:
  selector: {app: $1}
  ports: [{port: 80, targetPort: 8080}]
YAML
    kubectl rollout status "deployment/$1" --timeout="${patience}s"
}

# answers FROM TO: a pod of the workload FROM reaches the service TO, by its address.
answers() {
    address=$(kubectl get service "$2" -o 'jsonpath={.spec.clusterIP}')
    says "this is $2" kubectl exec "deployment/$1" -- timeout 5 wget -qO- "http://$address/"
}

# resolves FROM TO: the same by name.
resolves() {
    says "this is $2" kubectl exec "deployment/$1" -- timeout 5 wget -qO- "http://$2.default.svc.cluster.local/"
}

# kube_proxy MACHINE NODE: upstream's kube-proxy with the configuration that the cluster offers, as kubeadm's DaemonSet
# mounts it.
kube_proxy() {
    folder=$machines_folder/$1/kube-proxy
    mkdir -p "$folder"
    for file in config.conf kubeconfig.conf; do
        kubectl -n kube-system get configmap kube-proxy -o "jsonpath={.data.$(echo $file | sed 's/\./\\./')}" |
            sed "s|/var/lib/kube-proxy|$folder|; s|/var/run/secrets/kubernetes.io/serviceaccount|$folder|" >"$folder/$file"
    done
    # A namespace cannot set the kernel's limit of connections.
    echo 'conntrack: {maxPerCore: 0}' >>"$folder/config.conf"
    kubectl -n kube-public get configmap kube-root-ca.crt -o 'jsonpath={.data.ca\.crt}' >"$folder/ca.crt"
    kubectl -n kube-system create token kube-proxy --duration=2h >"$folder/token"
    background "$1" "kube-proxy-$2" kube-proxy --config="$folder/config.conf" --hostname-override="$2"
    wait_until "kube-proxy on $1 has its rules" machine "$1" nft list table ip kube-proxy
}
