//! For tests only: a whole cluster under a name of its own, the real kubectl, images made on the spot, the
//! other programs that tests run beside skiff, and for tests of its clients an API server in this process. Everything started here ends when its value is dropped.

mod api_server;
mod balancer;
mod belongings;
mod clock;
mod cluster;
mod external;
mod image;
mod logind;
mod machines;
mod outage;
mod pod_signer;
mod random;
pub mod registers;
mod webhook;
pub mod whole_path;

pub use api_server::ApiServer;
pub use balancer::Balancer;
pub use belongings::{belongings, shims};
pub use clock::ShiftedClock;
pub use cluster::{Cluster, Kubectl};
pub use external::{Containerd, Etcd, EtcdMembers, Registry, free_port};
pub use image::{BUSYBOX, PAUSE, ballast_archive, busybox_archive, pause_archive};
pub use logind::Logind;
pub use machines::{Machine, Switch};
pub use outage::StoreSwitch;
pub use pod_signer::PodSigner;
pub use random::Random;
pub use webhook::Webhook;

use anyhow::{Result, bail};
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Asks again until the answer is `Ok`, for at most `patience`; then fails with the last refusal.
pub fn eventually<T>(what: &str, patience: Duration, mut ask: impl FnMut() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) if began.elapsed() > patience => {
                bail!("{what}: not within {patience:?}; at last: {error:#}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// `Ok` if both are equal, else what was found; for use inside [`eventually`].
pub fn expect_eq<T: PartialEq + Debug>(found: T, expected: T) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        bail!("found {found:?}, expected {expected:?}")
    }
}
