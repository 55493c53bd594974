//! The health of DRA devices, as drivers tell it by a stream. What is not told again in time is not known any more.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use skiff_devices::dra_health::dra_resource_health_client::DraResourceHealthClient;
use skiff_devices::dra_health::{HealthStatus, NodeWatchResourcesRequest};
use skiff_devices::{Channel, Code};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);
/// A driver's devices that are remembered.
const MAX_DEVICES: usize = 16384;
/// Upstream's limit; longer messages end in dots.
const MAX_MESSAGE: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    healthy: Option<bool>,
    message: String,
    at: Instant,
    timeout: Duration,
}

/// By pool and device.
type Devices = BTreeMap<(String, String), Told>;

#[derive(Default)]
pub struct Health {
    /// By driver. A leaf lock.
    known: Mutex<HashMap<String, Devices>>,
    pub changed: Notify,
}

fn cut(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE - 3));
        message.push_str("...");
    }
    message
}

impl Health {
    /// Whether the device is healthy, if that is known, and what its driver says about it.
    pub fn of(&self, driver: &str, pool: &str, device: &str) -> (Option<bool>, Option<String>) {
        let known = self.known.lock();
        let key = (pool.to_owned(), device.to_owned());
        let told = known.get(driver).and_then(|devices| devices.get(&key));
        match told.filter(|told| told.at.elapsed() <= told.timeout) {
            Some(told) => (
                told.healthy,
                Some(told.message.clone()).filter(|text| !text.is_empty()),
            ),
            None => (None, None),
        }
    }

    /// Follows a driver's stream until `stop`. Drivers without one are left alone.
    pub async fn follow(&self, driver: &str, channel: Channel, stop: CancellationToken) {
        loop {
            let served = tokio::select! {
                () = stop.cancelled() => false,
                served = self.follow_once(driver, channel.clone()) => served,
            };
            self.known.lock().remove(driver);
            self.changed.notify_one();
            if !served {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(RETRY) => {}
            }
        }
    }

    /// False if the driver has no such stream.
    async fn follow_once(&self, driver: &str, channel: Channel) -> bool {
        let mut client =
            DraResourceHealthClient::new(channel).max_decoding_message_size(skiff_devices::MAX_MESSAGE_SIZE);
        let mut stream = match client.node_watch_resources(NodeWatchResourcesRequest {}).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return status.code() != Code::Unimplemented,
        };
        loop {
            let told = match stream.message().await {
                Ok(Some(told)) => told,
                Ok(None) => return true,
                Err(status) => return status.code() != Code::Unimplemented,
            };
            let mut known = self.known.lock();
            let devices = known.entry(driver.to_owned()).or_default();
            for one in told.devices {
                let healthy = match HealthStatus::try_from(one.health) {
                    Ok(HealthStatus::Healthy) => Some(true),
                    Ok(HealthStatus::Unhealthy) => Some(false),
                    _ => None,
                };
                let seconds = u64::try_from(one.health_check_timeout_seconds).unwrap_or(0);
                let timeout = if seconds == 0 {
                    DEFAULT_TIMEOUT
                } else {
                    Duration::from_secs(seconds)
                };
                let id = one.device.unwrap_or_default();
                let key = (id.pool_name, id.device_name);
                if devices.len() < MAX_DEVICES || devices.contains_key(&key) {
                    let (message, at) = (cut(one.message), Instant::now());
                    devices.insert(
                        key,
                        Told {
                            healthy,
                            message,
                            at,
                            timeout,
                        },
                    );
                }
            }
            drop(known);
            self.changed.notify_one();
        }
    }
}
