# The CSI hostpath driver with upstream's sidecars on a skiff node: see run.sh. The driver and the sidecars are programs that
# somebody has built: this scenario makes images of them, under the names that upstream's manifests use, and applies these.
. "$(dirname "$0")/lib.sh"
programs=${CSI_PROGRAMS:-$2}
for program in hostpathplugin csi-provisioner csi-attacher csi-resizer csi-snapshotter snapshot-controller \
    csi-node-driver-registrar livenessprobe; do
    [ -x "$programs/$program" ] || {
        echo "$programs/$program is missing: build the driver and the sidecars of kubernetes-csi statically into that folder" >&2
        exit 1
    }
done
kubernetes=v1.36.4
module=$(go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
manifests=$module/test/e2e/testing-manifests/storage-csi
snapshots=$module/cluster/addons/volumesnapshots
driver=hostpath.csi.k8s.io
kubelet=/var/lib/kubelet
# How many volumes the driver says that a node can have.
limit=12

start mix-one
skiff_machines=mix-one
admin="mix-one $machines_folder/mix-one/lib/skiff/admin.kubeconfig"
data=$machines_folder/mix-one/data
mkdir -p "$data"
before_finish() {
    kubectl get events -A >"$work/events.log" 2>&1
    cp "$machines_folder/mix-one/lib/skiff/skiff.log" "$work/skiff.log"
    for container in hostpath node-driver-registrar csi-attacher csi-provisioner csi-resizer csi-snapshotter; do
        kubectl logs csi-hostpathplugin-0 -c "$container" >"$work/$container.log" 2>&1
    done
    machine mix-one "$skiff" down --delete >/dev/null 2>&1
    # A volume of mode Block is a loop device, which belongs to the whole machine.
    loops | xargs -r -n1 losetup -d
}
# The kernel shows a backing file as the driver's container saw it: by its name in the folder of the data.
loops() {
    losetup --list --noheadings --raw --output NAME,BACK-FILE | while read -r loop file; do
        [ ! -e "$data/$(basename "$file")" ] || echo "$loop"
    done
}
up() { machine mix-one "$skiff" up --no-kubeconfig-merge --root-dir "$kubelet" >"$work/up.log" 2>&1; }
crash() { kill -9 "$(cat "$machines_folder/mix-one/lib/skiff/skiff.pid")"; }
up

echo "-- installing the driver"
# The health monitor and the service of snapshot metadata are left out; a driver that attaches, and has a limit.
sed "s|/var/lib/csi-hostpath-data/|$data|
    s|\( *\)# end hostpath args|\1- --enable-attach\n\1- --maxvolumespernode=$limit|" "$manifests/hostpath/hostpath/csi-hostpath-plugin.yaml" |
    awk '/^        - /{skip=0}
        /^        - name: (csi-external-health-monitor-controller|csi-snapshot-metadata|csi-snapshot-metadata-server-certs)$/{skip=1}
        /^        # end/{skip=0}
        !skip' >"$work/plugin.yaml"
# tar starts gzip by a shell.
tools=/bin/sh
for tool in mount umount losetup fallocate findmnt tar gzip cp dd blkid mkfs.ext4; do
    tools="$tools $(command -v "$tool")"
done
controller=$snapshots/volume-snapshot-controller
for image in $(grep -ho 'image: .*' "$work/plugin.yaml" "$controller"/*.yaml | cut -d' ' -f2 | sort -u); do
    program=$(basename "${image%:*}")
    # shellcheck disable=SC2086
    program_archive "$work/image.tar" "$image" "$programs/$program" $([ "$program" != hostpathplugin ] || echo $tools)
    machine mix-one "$skiff" image import "$work/image.tar"
done
rm "$work/image.tar"
machine mix-one "$skiff" image import "$(busybox_archive)"
kubectl apply -f "$snapshots/crd"
kubectl wait --for=condition=Established crd --all --timeout="${patience}s"
kubectl apply -f "$controller"
for part in external-attacher external-provisioner external-resizer external-snapshotter/csi-snapshotter; do
    kubectl apply -f "$manifests/$part"
done
kubectl apply -f "$manifests/hostpath/hostpath/csi-hostpath-driverinfo.yaml" -f "$work/plugin.yaml" \
    -f "$manifests/hostpath/hostpath/csi-hostpath-snapshotclass.yaml"
for class in "now Immediate Delete" "later WaitForFirstConsumer Delete" "kept Immediate Retain"; do
    # shellcheck disable=SC2086
    set -- $class
    kubectl apply -f - <<YAML
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: $1}
provisioner: $driver
volumeBindingMode: $2
reclaimPolicy: $3
allowVolumeExpansion: true
YAML
done
kubectl rollout status statefulset/csi-hostpathplugin --timeout="${patience}s"
kubectl -n kube-system rollout status statefulset/volume-snapshot-controller --timeout="${patience}s"
wait_until "the CSINode has the driver and its limit" says "$limit" \
    kubectl get csinode mix-one -o "jsonpath={.spec.drivers[?(@.name==\"$driver\")].allocatable.count}"
wait_until "the Node has the driver's topology" says mix-one \
    kubectl get node mix-one -o 'jsonpath={.metadata.labels.topology\.hostpath\.csi/node}'

# claim NAME CLASS [SPEC…]: more lines of its spec are arguments of their own.
claim() {
    claim_name=$1
    class=$2
    shift 2
    kubectl apply -f - <<YAML
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $claim_name}
spec:
  storageClassName: $class
  accessModes: [${access:-ReadWriteOnce}]
  resources: {requests: {storage: ${size:-64Mi}}}
$(printf '  %s\n' "$@")
YAML
}

# pod NAME VOLUME [SPEC…]: a pod that sleeps, with the volume v at /data.
pod() {
    pod_name=$1
    volume=$2
    shift 2
    kubectl apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $pod_name}
spec:
  # Not 0: then the API server would delete the pod before its volumes are unmounted.
  terminationGracePeriodSeconds: 1
  volumes: [{name: v, $volume}]
  containers:
  - name: c
    image: $busybox
    command: [sh, -c, 'exec sleep 100000']
    ${use:-"volumeMounts: [{name: v, mountPath: /data}]"}
$(printf '  %s\n' "$@")
YAML
}
of_claim() { echo "persistentVolumeClaim: {claimName: $1}"; }
block='volumeDevices: [{name: v, devicePath: /dev/raw}]'

runs() { says Running kubectl get pod "$1" -o 'jsonpath={.status.phase}'; }
is_gone() { [ -z "$(kubectl get "$@" --ignore-not-found -o name)" ]; }
inside() {
    entered_pod=$1
    shift
    kubectl exec "$entered_pod" -- sh -ec "$*"
}
phase() { says "$3" kubectl get "$1" "$2" -o 'jsonpath={.status.phase}'; }
volume_of() { kubectl get pvc "$1" -o 'jsonpath={.spec.volumeName}'; }
handle_of() { kubectl get pv "$(volume_of "$1")" -o 'jsonpath={.spec.csi.volumeHandle}'; }
# mounts TEXT: the mount points of the kubelet that have the text in their path, one a line. Its folder is a mount itself, so that each is
# there once more under the folder's other name.
mounts() { machine mix-one cut -d' ' -f5 /proc/self/mountinfo | grep "^$kubelet/" | grep -F -- "$1" || true; }
attached_to() { kubectl get volumeattachment -o "jsonpath={.items[?(@.spec.source.persistentVolumeName==\"$1\")].status.attached}"; }
# Nothing of the volume is left on the node: no mount, no attachment, no note.
let_go() {
    [ -z "$(mounts "/$1/")" ] && [ -z "$(mounts "/$1")" ] && [ -z "$(attached_to "$1")" ] &&
        [ -z "$(find "$machines_folder/mix-one/kubelet" -xdev -path "*$1*" 2>/dev/null)" ]
}

echo "-- provisioning"
claim first now
wait_until "a claim of a class that binds at once is bound" phase pvc first Bound
claim second later
wait_until "a claim of a class that waits says so" says WaitForFirstConsumer kubectl get events \
    --field-selector involvedObject.name=second -o 'jsonpath={.items[*].reason}'
phase pvc second Pending
pod first "$(of_claim first)"
pod second "$(of_claim second)"
wait_until "a pod with the first runs" runs first
wait_until "a pod with the second runs, and its claim is bound" runs second
phase pvc second Bound
inside first 'echo precious >/data/file; sync'
first=$(volume_of first)
says true attached_to "$first"
says "$driver" kubectl get node mix-one -o 'jsonpath={.status.volumesAttached[*].name}'
[ "$(mounts "$first" | wc -l)" = 1 ]
# What is asked below when the pod is gone.
if let_go "$first"; then
    echo "a volume that a pod uses counts as let go" >&2
    exit 1
fi

echo "-- statistics"
stats() { kubectl get --raw /api/v1/nodes/mix-one/proxy/stats/summary | tr -d ' \n' | grep -o '{[^{}]*"pvcRef":{[^}]*}[^}]*}'; }
wait_until "the summary has the claim" says '"name":"first"' stats
wait_until "the metrics have the claim" says 'kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="first"}' \
    kubectl get --raw /api/v1/nodes/mix-one/proxy/metrics

echo "-- replacing a pod"
kubectl delete pod first --wait=true
wait_until "the volume is unmounted and detached" let_go "$first"
pod first "$(of_claim first)" 'securityContext: {fsGroup: 4321, runAsUser: 1000}'
wait_until "another pod with the claim runs" runs first
wait_until "it finds the data" says precious inside first cat /data/file
wait_until "the volume belongs to its group" says 4321 inside first 'stat -c %g /data'
inside first 'echo more >/data/more'
says 4321 inside first 'stat -c %g /data/more'

echo "-- expansion"
kubectl patch pvc first -p '{"spec":{"resources":{"requests":{"storage":"128Mi"}}}}'
wait_until "the claim has its new size" says 128Mi kubectl get pvc first -o 'jsonpath={.status.capacity.storage}'
settled() { [ -z "$(kubectl get pvc first -o 'jsonpath={.status.conditions}{.status.allocatedResourceStatuses}')" ]; }
wait_until "and no condition of growing" settled
says 128Mi kubectl get pv "$first" -o 'jsonpath={.spec.capacity.storage}'
says precious inside first cat /data/file

echo "-- block volumes"
claim raw now 'volumeMode: Block'
use=$block pod raw "$(of_claim raw)"
wait_until "a pod with a device runs" runs raw
inside raw 'echo on the device | dd of=/dev/raw conv=notrunc 2>/dev/null; sync'
raw=$(volume_of raw)
kubectl delete pod raw --wait=true
wait_until "the device is taken away" let_go "$raw"
use=$block pod raw "$(of_claim raw)"
wait_until "another pod with the device runs" runs raw
wait_until "it finds the data" says "on the device" inside raw 'dd if=/dev/raw bs=32 count=1 2>/dev/null'

echo "-- snapshots and clones"
snapshot() {
    kubectl apply -f - <<YAML
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec:
  volumeSnapshotClassName: csi-hostpath-snapclass
  source: {persistentVolumeClaimName: $2}
YAML
    wait_until "the snapshot $1 is ready" says true kubectl get volumesnapshot "$1" -o 'jsonpath={.status.readyToUse}'
}
snapshot of-first first
snapshot of-raw raw
inside first 'echo changed >/data/file'
from_snapshot() { echo "dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: $1}"; }
size=128Mi claim restored later "$(from_snapshot of-first)"
claim restored-raw now 'volumeMode: Block' "$(from_snapshot of-raw)"
size=128Mi claim clone later 'dataSource: {kind: PersistentVolumeClaim, name: first}'
pod restored "$(of_claim restored)"
pod clone "$(of_claim clone)"
use=$block pod restored-raw "$(of_claim restored-raw)"
wait_until "a pod with the restored volume runs" runs restored
says precious inside restored cat /data/file
wait_until "a pod with the restored device runs" runs restored-raw
says "on the device" inside restored-raw 'dd if=/dev/raw bs=32 count=1 2>/dev/null'
wait_until "a pod with the clone runs" runs clone
says changed inside clone cat /data/file
kubectl delete pod restored restored-raw clone raw --wait=true
kubectl delete pvc restored restored-raw clone raw --wait=true
kubectl delete volumesnapshot --all --wait=true
wait_until "the contents of the snapshots are gone" is_gone volumesnapshotcontent

echo "-- ephemeral volumes"
pod inline "csi: {driver: $driver}"
pod generic "ephemeral: {volumeClaimTemplate: {spec: {storageClassName: later, accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}}}"
wait_until "a pod with an inline volume runs" runs inline
wait_until "a pod with a generic ephemeral volume runs" runs generic
inside inline 'echo x >/data/file'
inside generic 'echo x >/data/file'
phase pvc generic-v Bound
kubectl delete pod inline generic --wait=true
wait_until "the claim goes with its pod" is_gone pvc generic-v

echo "-- ReadWriteOncePod"
access=ReadWriteOncePod claim single now
pod single "$(of_claim single)"
wait_until "a pod with the claim runs" runs single
pod refused "$(of_claim single)"
wait_until "the scheduler refuses a second one" says ReadWriteOncePod \
    kubectl get pod refused -o 'jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}'
pod forced "$(of_claim single)" 'nodeName: mix-one'
wait_until "the node refuses it too" says "already in use by another pod" kubectl get events \
    --field-selector involvedObject.name=forced -o 'jsonpath={.items[*].message}'
kubectl delete pod refused forced single --wait=true
kubectl delete pvc single --wait=true

echo "-- StatefulSet"
kubectl apply -f - <<YAML
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: set}
spec:
  serviceName: set
  replicas: 2
  persistentVolumeClaimRetentionPolicy: {whenScaled: Delete, whenDeleted: Retain}
  selector: {matchLabels: {app: set}}
  template:
    metadata: {labels: {app: set}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: $busybox
        command: [sh, -c, 'hostname >>/data/names; exec sleep 100000']
        volumeMounts: [{name: v, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: v}
    spec: {storageClassName: later, accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
YAML
kubectl rollout status statefulset/set --timeout="${patience}s"
kubectl scale statefulset/set --replicas=3
kubectl rollout status statefulset/set --timeout="${patience}s"
for number in 0 1 2; do says "set-$number" inside "set-$number" cat /data/names; done
kubectl scale statefulset/set --replicas=1
wait_until "the claims of pods that were scaled away go" is_gone pvc v-set-1 v-set-2
kubectl delete pod set-0 --wait=true
wait_until "the first is made again" runs set-0
wait_until "with its data" says "set-0
set-0" inside set-0 cat /data/names
kubectl delete statefulset set --cascade=foreground --wait=true
phase pvc v-set-0 Bound
kubectl delete pvc v-set-0 --wait=true

echo "-- reclaiming"
claim kept kept
wait_until "a claim of a class that retains is bound" phase pvc kept Bound
kept=$(volume_of kept)
handle=$(handle_of kept)
kubectl delete pvc kept --wait=true
wait_until "its volume is released" phase pv "$kept" Released
[ -e "$data/$handle" ]
second=$(volume_of second)
handle=$(handle_of second)
kubectl delete pvc second --wait=false
kubectl delete pod second --wait=true
wait_until "a claim that is deleted goes with its last pod" is_gone pvc second
wait_until "and its volume too" is_gone pv "$second"
[ ! -e "$data/$handle" ]
kubectl patch pv "$kept" -p '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}'
wait_until "a released volume goes when its policy says so" is_gone pv "$kept"

echo "-- the limit of volumes"
many=""
uses=""
for number in $(seq $((limit + 1))); do
    size=1Mi claim "many-$number" now >/dev/null
    many="$many{name: v$number, persistentVolumeClaim: {claimName: many-$number}}, "
    uses="$uses{name: v$number, mountPath: /v$number}, "
done
kubectl wait pvc --for=jsonpath='{.status.phase}'=Bound --timeout="${patience}s" $(seq -f 'many-%g' $((limit + 1))) >/dev/null
kubectl apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: greedy}
spec:
  volumes: [$many]
  containers: [{name: c, image: $busybox, volumeMounts: [$uses]}]
YAML
wait_until "a pod with too many volumes is not scheduled" says "exceed max volume count" \
    kubectl get pod greedy -o 'jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}'
kubectl delete pod greedy --wait=true
kubectl delete pvc $(seq -f 'many-%g' $((limit + 1))) --wait=true >/dev/null

# Each mount point once.
mounted_once() { [ -z "$(mounts 'kubernetes.io~csi' | sort | uniq -d)" ]; }

echo "-- the driver goes away and comes back"
kubectl scale statefulset/csi-hostpathplugin --replicas=0
wait_until "the driver is away" is_gone pod csi-hostpathplugin-0
says changed inside first cat /data/file
kubectl delete pod first --wait=false
# Long enough for the pod to end, if it did not wait.
sleep 5
kubectl get pod first
[ "$(mounts "$first" | wc -l)" = 1 ]
kubectl scale statefulset/csi-hostpathplugin --replicas=1
kubectl rollout status statefulset/csi-hostpathplugin --timeout="${patience}s"
wait_until "a pod that was deleted meanwhile ends" is_gone pod first
wait_until "its volume is unmounted and detached" let_go "$first"
pod first "$(of_claim first)"
wait_until "another pod with the claim runs" runs first
says changed inside first cat /data/file
kubectl delete pod csi-hostpathplugin-0 --grace-period=0 --force
kubectl rollout status statefulset/csi-hostpathplugin --timeout="${patience}s"
wait_until "a driver that was killed is registered again" says "$driver" kubectl get csinode mix-one -o 'jsonpath={.spec.drivers[*].name}'

echo "-- skiff is killed"
for delay in 0 0.2 0.4 0.7 1 1.5 2 3; do
    pod "crash" "$(of_claim first)" >/dev/null
    pod "crash-inline" "csi: {driver: $driver}" >/dev/null
    sleep "$delay"
    crash
    up
    wait_until "killed $delay s after the creation of pods, they run" runs crash
    wait_until "the one with an inline volume too" runs crash-inline
    says changed inside crash cat /data/file
    inside crash-inline 'echo x >/data/file'
    mounted_once
    kubectl delete pod crash crash-inline --wait=false >/dev/null
    sleep "$delay"
    crash
    up
    wait_until "killed $delay s after their deletion, they end" is_gone pod crash crash-inline
    says changed inside first cat /data/file
    mounted_once
done

echo "-- the end"
kubectl delete pod first --wait=true
kubectl delete pvc --all --wait=true
wait_until "all volumes are gone" is_gone pv
wait_until "all attachments are gone" is_gone volumeattachment
nothing_left() {
    mounts 'kubernetes.io~csi'
    mounts kubernetes.io/csi
    find "$machines_folder/mix-one/kubelet/plugins/kubernetes.io/csi" "$machines_folder/mix-one/kubelet/pods" \
        -xdev \( -name vol_data.json -o -path '*/volumeDevices/*/*' -o -name globalmount \)
    loops
    find "$data" -mindepth 1 -maxdepth 1 ! -name state.json
}
clean() { says_nothing=$(nothing_left) && [ -z "$says_nothing" ] || { echo "$says_nothing"; return 1; }; }
wait_until "nothing is mounted, noted or stored" clean
