//! The attack suite: each published way out of a container that reaches this code, tried with a hostile
//! image, volume or configuration, and refused. Without root every test says that it was skipped.
//!
//! | class | published as | test |
//! |---|---|---|
//! | /proc, /sys or /dev of the image is a link | CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2023-28642 | `mounts::linked_mount_points` |
//! | a volume on or below /proc | CVE-2019-16884, CVE-2025-52881 | `mounts::volumes_over_proc` |
//! | files of the runtime behind links of the image | CVE-2019-14271, CVE-2024-45310 | `mounts::linked_files` |
//! | /dev/null, /dev/console or /dev/pts replaced | CVE-2025-31133, CVE-2025-52565 | `mounts::volume_over_dev`, `process::terminals` |
//! | masked paths seen after all | CVE-2023-27561 | `mounts::masks_hold` |
//! | a shared volume changes while it is mounted | CVE-2021-30465, CVE-2024-45310 | `mounts::shared_volume_race` |
//! | leaked descriptors, working directory | CVE-2016-9962, CVE-2024-21626 | `process::descriptors`, `process::working_directory` |
//! | the host's binary by /proc/self/exe | CVE-2019-5736 | `process::own_binary`, and `basics::confinement` of `containers` |
//! | looking into a process that joins | CVE-2016-9962 | `process::joining` |
//! | user numbers that mean root | CVE-2024-40635 | `process::user_numbers` |
//! | inheritable capabilities | CVE-2022-24769, CVE-2022-29162 | `process::descriptors` |
//! | sockets and directories of the runtime | CVE-2020-15257, CVE-2021-41103 | `process::runtime_files` |
//! | endless output of an exec | CVE-2022-1708, CVE-2022-31030 | `process::endless_output` |
//! | logs and their files replaced by links | hostPath of /var/log | `process::log_links`, `server::logs` of the node |
//! | cgroup release agent, cgroups of others | CVE-2022-0492 | `kernel::cgroups` |
//! | device nodes of the image or made inside | | `kernel::devices` |
//! | sysctls outside of the pod's namespaces | CVE-2022-0811 | `kernel::sysctls` |
//! | seccomp profiles of strangers | | `kernel::seccomp_profiles` |
//! | layers that write outside: `..`, links, hard links, whiteouts, attributes of overlayfs | CVE-2018-15664, CVE-2021-32760, CVE-2022-23648 | `layers::stay_inside`, `image::unpack` |
//! | registries, layers and archives without an end or with wrong sizes | CVE-2023-25153 | `registries::hostile_registry`, `registries::bombs` |
//! | a layer taken for another one | | `registries::whole_digests` |
//! | root of a user namespace reaches what is the host's | CVE-2023-25809 | `users::root_inside`, `users::root_stays_inside` |
//! | half a user namespace: another pod's ids, the host's other namespaces | | `users::what_cannot_be_mapped`, `users::namespaces_of_the_pod` |
//! | links among the files that a checkpoint reads, and where it is written | | `daemon::checkpoint::diff`, `checkpoint::refusals` of the containers' suite |
//! | subPath | CVE-2017-1002101, CVE-2021-25741 | `volumes::sub_path` of the node |
//!
//! Not tried, because this runtime has no such code: netlink attributes of namespaces (CVE-2021-43784), labels of SELinux and AppArmor (CVE-2019-16884, CVE-2025-52881), copying files in and out
//! (CVE-2018-15664, CVE-2019-14271), volumes of image configurations (CVE-2022-23648), CDI, NRI.
//! Not tried, because it is not the runtime's to refuse: CNI plugins that others install (CVE-2021-20206; the
//! administrator writes their configuration), faults of the kernel (CVE-2022-0847, CVE-2024-1086), and
//! what a privileged container may do.

#[allow(dead_code, reason = "shared with the tests of `containers`")]
#[path = "../containers/environment.rs"]
mod environment;
#[path = "../containers/harness.rs"]
mod harness;
mod kernel;
mod layers;
mod mounts;
mod process;
mod registries;
mod support;
mod users;
#[allow(dead_code, reason = "shared with the tests of `containers`")]
#[path = "../containers/websocket.rs"]
mod websocket;

use harness::{Test, tests};

const TESTS: &[Test] = tests![
    mounts::linked_mount_points,
    mounts::volumes_over_proc,
    mounts::linked_files,
    mounts::volume_over_dev,
    mounts::masks_hold,
    mounts::shared_volume_race,
    process::descriptors,
    process::working_directory,
    process::own_binary,
    process::joining,
    process::user_numbers,
    process::runtime_files,
    process::endless_output,
    process::log_links,
    process::terminals,
    kernel::cgroups,
    kernel::devices,
    kernel::sysctls,
    kernel::seccomp_profiles,
    layers::stay_inside,
    layers::many_layers,
    registries::hostile_registry,
    registries::bombs,
    registries::whole_digests,
    users::root_inside,
    users::root_stays_inside,
    users::namespaces_of_the_pod,
    users::what_cannot_be_mapped,
];

fn main() {
    harness::main(TESTS);
}
