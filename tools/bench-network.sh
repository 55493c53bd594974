#!/bin/sh
# bench-network.sh SKIFF BENCH [SERVICES…]: skiff's service proxy beside upstream's kube-proxy in nftables mode, in one run:
# both follow one API server (skiff's), each on a machine of its own (a network namespace), while endpoints change. SKIFF and
# BENCH are the binaries `skiff` and `bench-network`, of whichever build. See bench-network.py for what is measured.
set -eu
skiff=$(realpath "${1:?usage: bench-network.sh SKIFF BENCH [SERVICES…]}")
bench=$(realpath "${2:?usage: bench-network.sh SKIFF BENCH [SERVICES…]}")
shift 2
[ $# -gt 0 ] || set -- 1000 5000 10000
here=$(realpath "$(dirname "$0")")
upstream=$(realpath -m "${UPSTREAM:-$here/../target/upstream}")
sh "$here/upstream.sh" "$upstream" kube-proxy
. "$here/machines.sh"
folder=$(mktemp -d)
end() {
    machine bench-api "$skiff" down --delete >/dev/null 2>&1 || true
    machines_end
}
trap end EXIT
trap 'exit 1' INT TERM
machines_start "$folder" bench-api bench-skiff bench-upstream
for services in "$@"; do
    # Afresh for every size: what an earlier one left would be loaded too.
    machine bench-api "$skiff" up --components api --no-kubeconfig-merge >/dev/null
    sed "s|https://127.0.0.1:|https://$(machine_address bench-api):|" "$folder/bench-api/lib/skiff/admin.kubeconfig" >"$folder/kubeconfig"
    BENCH="$bench" KUBE_PROXY="$upstream/bin/kube-proxy" FOLDER="$folder" \
        machines_enter switch --net python3 "$here/bench-network.py" "$services"
    machine bench-api "$skiff" down --delete >/dev/null
done
