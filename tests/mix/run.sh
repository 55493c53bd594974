#!/bin/sh
# `make mix`: skiff's parts and upstream's in one cluster, each with the other's. Upstream's programs are built by Go from
# their modules (tools/upstream.sh), containerd, runc and the CNI plugins are Debian's; the machines are namespaces of this
# one. Takes root and takes everything down again.
#
#   run.sh SKIFF-BINARY [SCENARIO…]
#
#   kubeadm   `kubeadm join`, upstream's kubelet and containerd, against a skiff server
#   agent     `skiff join` against upstream's control plane
#   proxy     upstream's kube-proxy in place of skiff's
#   runtime   upstream's kubelet on skiff's embedded runtime
#   flannel   flannel in place of skiff's pod network, and the throughput of both (SECONDS_EACH=5, three times)
#   devices   upstream's sample device plugin on a skiff node
#   csi       the CSI hostpath driver and upstream's sidecars; only when it is named, because their programs are not built
#             here: CSI_PROGRAMS is the folder that has them
#   metrics   the real metrics-server by its chart, in place of skiff's Metrics API
#   node      only by name, since it measures: pods of a joined skiff beside those of upstream's kubelet with containerd
#
# UPSTREAM is the folder whose bin/ has upstream's programs, or gets them. OUT is where the logs go.
set -eu
skiff=$(realpath "${1:?usage: run.sh SKIFF-BINARY [SCENARIO…]}")
shift
[ $# -gt 0 ] || set -- kubeadm agent proxy runtime flannel devices metrics
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${OUT:-$here/../../target/mix}")
upstream=$(realpath -m "${UPSTREAM:-$out/upstream}")

command -v go >/dev/null || {
    echo "make mix builds upstream's programs from their Go modules and needs Go 1.26 or newer: install it and try again" >&2
    exit 1
}
needs() {
    case $1 in
        kubeadm) echo kubeadm kubelet kube-proxy ;;
        agent) echo etcd kube-apiserver kube-controller-manager kube-scheduler kubeadm ;;
        proxy) echo kube-proxy ;;
        runtime | node) echo kubeadm kubelet ;;
        flannel) echo flanneld ;;
        metrics) echo metrics-server helm ;;
        devices | csi) ;;
        *) echo "there is no scenario $1" >&2; return 1 ;;
    esac
}
programs=""
for scenario in "$@"; do
    programs="$programs $(needs "$scenario")"
    [ "$scenario" != devices ] || sh "$here/../../tools/sample-device-plugin.sh" "$upstream"
done
echo "building upstream's programs (the first time takes ten minutes)"
# shellcheck disable=SC2086
[ -z "$(echo $programs)" ] || sh "$here/../../tools/upstream.sh" "$upstream" $programs
for scenario in "$@"; do
    echo "== $scenario"
    rm -rf --one-file-system "$out/$scenario"
    sh -eu "$here/$scenario.sh" "$skiff" "$upstream/bin" "$out/$scenario"
done
