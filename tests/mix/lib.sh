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

# A scenario that has something to gather or to clean itself defines before_finish.
finish() {
    status=$?
    ! command -v before_finish >/dev/null || before_finish || true
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

# pack_image ROOT FILE REFERENCE CONFIG: the folder ROOT as an image of one layer; CONFIG is the JSON of its `config`.
pack_image() {
    folder=$(mktemp -d "$work/image.XXXXXX")
    tar -C "$1" -cf "$folder/layer.tar" .
    layer=$(sha256sum "$folder/layer.tar" | cut -d' ' -f1)
    printf '{"architecture":"amd64","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$4" "$layer" >"$folder/config"
    config=$(sha256sum "$folder/config" | cut -d' ' -f1).json
    mv "$folder/config" "$folder/$config"
    printf '[{"Config":"%s","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$config" "$3" >"$folder/manifest.json"
    tar -C "$folder" -cf "$2" "$config" layer.tar manifest.json
    rm -r "$folder"
}

# image_archive FILE REFERENCE COMMAND: an image with Debian's static busybox; the command is a JSON list.
image_archive() {
    root=$(mktemp -d "$work/root.XXXXXX")
    chmod 755 "$root"
    mkdir -p "$root/bin" "$root/etc" "$root/tmp"
    cp /bin/busybox "$root/bin/"
    for applet in sh cat echo sleep httpd wget timeout nc mkdir; do
        ln -s busybox "$root/bin/$applet"
    done
    pack_image "$root" "$1" "$2" "{\"Env\":[\"PATH=/bin\"],\"Cmd\":$3}"
    rm -r "$root"
}

# program_archive FILE REFERENCE PROGRAM [TOOL…]: an image whose entrypoint is a static program, with tools of Debian and the
# libraries they are linked to.
program_archive() {
    root=$(mktemp -d "$work/root.XXXXXX")
    chmod 755 "$root"
    mkdir -p "$root/tmp"
    archive=$1
    reference=$2
    program=$3
    cp "$program" "$root/"
    shift 3
    for tool in "$@"; do
        for file in "$tool" $(ldd "$tool" 2>/dev/null | grep -o '/[^ ]*'); do
            mkdir -p "$root/$(dirname "$file")"
            cp -L "$file" "$root/$file"
        done
    done
    pack_image "$root" "$archive" "$reference" \
        "{\"Env\":[\"PATH=/usr/sbin:/usr/bin:/sbin:/bin\"],\"Entrypoint\":[\"/$(basename "$program")\"]}"
    rm -r "$root"
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

# containerd_on MACHINE ARCHIVE…: containerd as its package installs it, with the images that no registry brings here.
containerd_on() {
    node=$1
    shift
    fresh_files "$node"
    files=$machines_folder/$node/files
    image_archive "$work/pause.tar" "$pause" '["sleep", "2147483647"]'
    mkdir -p "$files/etc/containerd"
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
    background "$node" containerd containerd
    wait_until "containerd answers" machine "$node" ctr version
    for one in "$work/pause.tar" "$@"; do
        machine "$node" ctr --namespace k8s.io image import "$one" >/dev/null
    done
}

# join_kubelet MACHINE SERVER FLAG…: upstream's kubelet, as its package installs it, on a machine that `kubeadm join` with
# these flags makes a node of the server's cluster.
join_kubelet() {
    node=$1
    server=$2
    shift 2
    files=$machines_folder/$node/files
    mkdir -p "$files/opt/cni" "$files/etc/cni/net.d"
    ln -s /usr/lib/cni "$files/opt/cni/bin"
    # As the documents of kubeadm ask for it.
    machine "$node" sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'

    # What a user types. Patched and ignored is what this machine has not: systemd for cgroups, cgroups of version 2, and a
    # kernel configuration that can be read.
    mkdir "$files/patches"
    cat >"$files/patches/kubeletconfiguration0+merge.yaml" <<YAML
cgroupDriver: cgroupfs
failCgroupV1: false
# A disk that is full of builds is no matter here.
evictionHard: {memory.available: 10Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%, imagefs.inodesFree: 1%}
YAML
    line="$(machine "$server" "$skiff" token create --kubeadm) $*"
    echo "$line"
    # shellcheck disable=SC2086
    background "$node" kubeadm $line --patches "$files/patches" --ignore-preflight-errors=SystemVerification
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
    background "$node" kubelet sh -c '
        . /var/lib/kubelet/kubeadm-flags.env
        exec kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
            --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS'
    wait "$kubeadm" || {
        cat "$work/kubeadm.log" >&2
        exit 1
    }
    says "This node has joined the cluster" cat "$work/kubeadm.log"

    # The network of that machine, as its administrator chooses it: the bridge plugin.
    has_pods() { says / kubectl get node "$node" -o 'jsonpath={.spec.podCIDR}'; }
    wait_until "the Node has a pod network" has_pods
    cat >"$files/etc/cni/net.d/10-bridge.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "mix", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$(kubectl get node "$node" -o 'jsonpath={.spec.podCIDR}')"}]],
            "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
    wait_until "the Node is Ready" node_is_ready "$node"
}
