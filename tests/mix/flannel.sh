# flannel in place of skiff's pod network (`--pod-network none`), with VXLAN and with routes, and the throughput between pods
# of two nodes beside skiff's own: see run.sh. flannel's daemon is the real one. Its CNI plugin only makes a configuration
# of the bridge plugin out of the file that the daemon writes: that is done here, so that Debian's bridge plugin is enough.
. "$(dirname "$0")/lib.sh"

start flannel-one flannel-two
skiff_machines="flannel-two flannel-one"
archive=$(busybox_archive)
seconds=${SECONDS_EACH:-5}
tool=$(realpath "$(dirname "$0")/throughput.py")
python=$(command -v python3)

has_pods() { says / kubectl get node "$1" -o 'jsonpath={.spec.podCIDR}'; }

# Keeps the id of a program that is ended later, for `sh -c`.
record='echo $$ >"$1"; shift; exec "$@"'

# flannel MACHINE BACKEND: the daemon, and what its CNI plugin would hand on to the bridge plugin.
flannel() {
    wait_until "the Node $1 has a pod network" has_pods "$1"
    folder=$machines_folder/$1/flannel
    mkdir -p "$folder"
    echo "{\"Network\": \"10.244.0.0/16\", \"EnableNFTables\": true, \"Backend\": {\"Type\": \"$2\"}}" >"$folder/net-conf.json"
    background "$1" "flanneld-$1-$2" sh -c "$record" record "$folder/pid" env NODE_NAME="$1" flanneld --kube-subnet-mgr --kubeconfig-file="$folder/kubeconfig" \
        --net-config-path="$folder/net-conf.json" --subnet-file="$folder/subnet.env" --iface=eth0 --ip-masq
    wait_until "flannel on $1 has its subnet" test -s "$folder/subnet.env"
    subnet=$(sed -n 's/^FLANNEL_SUBNET=//p' "$folder/subnet.env" | sed 's|\.1/|.0/|')
    mtu=$(sed -n 's/^FLANNEL_MTU=//p' "$folder/subnet.env")
    mkdir -p "$machines_folder/$1/lib/skiff/cni/conf"
    cat >"$machines_folder/$1/lib/skiff/cni/conf/10-flannel.conflist" <<JSON
{"cniVersion": "0.3.1", "name": "cbr0", "plugins": [
  {"type": "bridge", "bridge": "cni0", "mtu": $mtu, "ipMasq": false, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$subnet"}]], "routes": [{"dst": "10.244.0.0/16"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
JSON
}

# cluster NETWORK: two nodes, with skiff's pod network or with one of flannel's backends.
cluster() {
    network=$1
    admin="flannel-one $machines_folder/flannel-one/lib/skiff/admin.kubeconfig"
    case $1 in
        flannel-*)
            # Not Ready before it has a network.
            background flannel-one up "$skiff" up --no-kubeconfig-merge --pod-network none
            up=$!
            wait_until "the API answers" kubectl get node flannel-one
            kubeconfig=$machines_folder/flannel-one/lib/skiff/admin.kubeconfig
            for one in flannel-one flannel-two; do
                mkdir -p "$machines_folder/$one/flannel"
                sed "s|https://127.0.0.1:|https://$(machine_address flannel-one):|" "$kubeconfig" >"$machines_folder/$one/flannel/kubeconfig"
            done
            flannel flannel-one "${1#flannel-}"
            wait "$up" || { cat "$work/up.log" >&2; exit 1; }
            # shellcheck disable=SC2046
            background flannel-two join "$skiff" $(machine flannel-one "$skiff" token create | cut -d' ' -f2-)
            joining=$!
            wait_until "the Node is there" kubectl get node flannel-two
            flannel flannel-two "${1#flannel-}"
            wait "$joining" || { cat "$work/join.log" >&2; exit 1; }
            ;;
        *)
            machine flannel-one "$skiff" up --no-kubeconfig-merge --pod-network "$1" >/dev/null
            # shellcheck disable=SC2046
            machine flannel-two "$skiff" $(machine flannel-one "$skiff" token create | cut -d' ' -f2-) >/dev/null
            ;;
    esac
    for one in flannel-one flannel-two; do
        wait_until "the Node $one is Ready" node_is_ready "$one"
        machine "$one" "$skiff" image import "$archive" >/dev/null
    done
    workload one flannel-one
    workload two flannel-two
}

remove_cluster() {
    kubectl delete deployment one two --wait=true >/dev/null
    gone() { [ -z "$(kubectl get pods -o name)" ]; }
    wait_until "the pods are gone" gone
    for one in flannel-two flannel-one; do
        machine "$one" "$skiff" down --delete >/dev/null
        if [ -s "$machines_folder/$one/flannel/pid" ]; then
            kill "$(cat "$machines_folder/$one/flannel/pid")" 2>/dev/null || true
            machine "$one" sh -c 'for link in flannel.1 cni0; do ip link del "$link" 2>/dev/null || true; done
                ip route flush root 10.244.0.0/16; nft flush ruleset'
            rm -rf "$machines_folder/$one/flannel"
        fi
    done
}

pod_address() { kubectl get pods -l "app=$1" -o 'jsonpath={.items[0].status.podIP}'; }

# in_pod MACHINE ADDRESS COMMAND…: on that machine, in the network of the pod with this address.
in_pod() {
    where=$1
    wanted=$2
    shift 2
    machine "$where" sh -c 'wanted=$1; shift
        for net in $(find /run/skiff -name net 2>/dev/null); do
            if nsenter --net="$net" ip -4 addr 2>/dev/null | grep -q "inet $wanted/"; then exec nsenter --net="$net" "$@"; fi
        done
        echo "no network of a pod has $wanted" >&2; exit 1' in_pod "$wanted" "$@"
}

# measure: Mbit/s between the pods, the best of three runs, in `measured`.
measure() {
    from=$(pod_address one)
    to=$(pod_address two)
    (in_pod flannel-two "$to" sh -c "$record" record "$work/server.pid" "$python" "$tool" serve 9000 >"$work/serve.log" 2>&1) &
    try() { in_pod flannel-one "$from" "$python" "$tool" send "$to" 9000 0.2; }
    wait_until "the pods reach each other" try
    measured=0
    for run in 1 2 3; do
        got=$(in_pod flannel-one "$from" "$python" "$tool" send "$to" 9000 "$seconds")
        echo "$network, run $run: $got Mbit/s"
        [ "$got" -le "$measured" ] || measured=$got
    done
    kill "$(cat "$work/server.pid")"
}

compare() {
    cluster "$1"
    measure
    ours=$measured
    remove_cluster
    cluster "$2"
    for pair in "one two" "two one"; do
        # shellcheck disable=SC2086
        wait_until "a service over flannel: $pair" answers $pair
    done
    measure
    remove_cluster
    awk -v ours="$ours" -v theirs="$measured" -v one="$1" -v two="$2" \
        'BEGIN {printf "throughput between pods: %s %d Mbit/s, %s %d Mbit/s, ratio %.2f\n", one, ours, two, theirs, ours / theirs}'
}

compare vxlan flannel-vxlan
compare direct flannel-host-gw
