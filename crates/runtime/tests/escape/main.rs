//! The attack suite: each published way out of a container that reaches this code, tried with a hostile
//! image, volume or configuration, and refused. Without root every test says that it was skipped.
//!
//! | class | published as | test |
//! |---|---|---|
//! | /proc, /sys or /dev of the image is a link | CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2023-28642 | `mounts::linked_mount_points` |
//! | a volume on or below /proc | CVE-2019-16884, CVE-2025-52881 | `mounts::volumes_over_proc` |
//! | files of the runtime behind links of the image | CVE-2019-14271, CVE-2024-45310 | `mounts::linked_files` |
//! | /dev/null, /dev/console or /dev/pts replaced | CVE-2025-31133, CVE-2025-52565 | `mounts::volume_over_dev` |
//! | masked paths seen after all | CVE-2023-27561 | `mounts::masks_hold` |
//! | a shared volume changes while it is mounted | CVE-2021-30465, CVE-2024-45310 | `mounts::shared_volume_race` |
//! | registries, layers and archives without an end or with wrong sizes | CVE-2023-25153 | `registries::hostile_registry`, `registries::bombs` |
//! | a layer taken for another one | | `registries::whole_digests` |
//! | subPath | CVE-2017-1002101, CVE-2021-25741 | `volumes::sub_path` of the node |
//!
//! Not tried: user namespaces and id-mapped mounts (CVE-2023-25809; refused as not built), SELinux and
//! AppArmor labels (CVE-2021-43784, CVE-2025-52881; none are written), `docker cp` and checkpoints
//! (CVE-2018-15664, CVE-2022-23648; not built), image volumes, CDI and NRI (not built), plugins of CNI that
//! others install (CVE-2021-20206; the configuration is the administrator's), faults of the kernel itself
//! (CVE-2022-0847, CVE-2024-1086).

#[allow(dead_code, reason = "shared with the tests of `containers`")]
#[path = "../containers/environment.rs"]
mod environment;
#[path = "../containers/harness.rs"]
mod harness;
mod mounts;
mod registries;
mod support;

use harness::{Test, tests};

const TESTS: &[Test] = tests![
    mounts::linked_mount_points,
    mounts::volumes_over_proc,
    mounts::linked_files,
    mounts::volume_over_dev,
    mounts::masks_hold,
    mounts::shared_volume_race,
    registries::hostile_registry,
    registries::bombs,
    registries::whole_digests,
];

fn main() {
    harness::main(TESTS);
}
