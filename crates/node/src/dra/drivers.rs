//! The DRA drivers of the node: they register in `plugins_registry`. While none of a driver's plugins can be reached, what it
//! offers on this node is taken back.

use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_client::ErrorExt;
use skiff_devices::{DRA_V1, DRA_V1BETA1, DraClient};
use tokio_util::sync::CancellationToken;

use super::health;
use crate::plugin_registry::{Plugin, PluginHandler};

/// The type that DRA drivers register with.
pub const DRA_PLUGIN: &str = "DRAPlugin";
/// Upstream's pause before the slices of a driver that is away are deleted.
const WIPING_DELAY: Duration = Duration::from_secs(30);
/// How often it is looked whether a plugin listens.
const LOOK_PERIOD: Duration = Duration::from_secs(2);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(300);
/// The newest first.
const SERVICES: [&str; 2] = [DRA_V1, DRA_V1BETA1];

struct Instance {
    driver: String,
    endpoint: PathBuf,
    client: DraClient,
    reachable: bool,
    stop: CancellationToken,
}

pub struct Drivers {
    client: Client,
    node_name: String,
    shutdown: CancellationToken,
    /// In the order in which they registered. A leaf lock.
    instances: Mutex<Vec<Instance>>,
    pub(super) health: health::Health,
    me: Weak<Drivers>,
}

/// COMPAT: the first service of the plugin's list that the kubelet knows.
fn chosen(versions: &[String]) -> Result<&'static str, String> {
    if versions.is_empty() {
        return Err("empty list of supported gRPC services (aka supported versions)".to_owned());
    }
    let known = |version: &String| SERVICES.into_iter().find(|service| service == version);
    versions.iter().find_map(known).ok_or_else(|| {
        format!(
            "none of services supported by the plugin ({versions:?}) are supported by the kubelet ({SERVICES:?})"
        )
    })
}

impl Drivers {
    pub fn new(client: Client, node_name: &str, shutdown: CancellationToken) -> Arc<Self> {
        Arc::new_cyclic(|me| Drivers {
            client,
            node_name: node_name.to_owned(),
            shutdown,
            instances: Mutex::default(),
            health: health::Health::default(),
            me: me.clone(),
        })
    }

    /// The newest plugin of the driver, one that can be reached first.
    pub fn get(&self, driver: &str) -> Result<DraClient, String> {
        let instances = self.instances.lock();
        let of_driver = || instances.iter().rev().filter(|one| one.driver == driver);
        let found = of_driver()
            .find(|one| one.reachable)
            .or_else(|| of_driver().next());
        found
            .map(|one| one.client.clone())
            .ok_or_else(|| format!("DRA driver {driver} is not registered"))
    }

    fn is_usable(&self, driver: &str) -> bool {
        let instances = self.instances.lock();
        instances.iter().any(|one| one.driver == driver && one.reachable)
    }

    /// Looks whether the plugin listens until it is deregistered.
    async fn watch(self: Arc<Self>, driver: String, endpoint: PathBuf, stop: CancellationToken) {
        loop {
            let reachable = tokio::net::UnixStream::connect(&endpoint).await.is_ok();
            let changed = {
                let mut instances = self.instances.lock();
                let own = instances
                    .iter_mut()
                    .find(|one| one.driver == driver && one.endpoint == endpoint);
                own.is_some_and(|own| std::mem::replace(&mut own.reachable, reachable) && !reachable)
            };
            if changed {
                self.wipe_later(&driver);
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(LOOK_PERIOD) => {}
            }
        }
    }

    fn wipe_later(&self, driver: &str) {
        let Some(me) = self.me.upgrade() else { return };
        let driver = driver.to_owned();
        tokio::spawn(async move {
            let shutdown = me.shutdown.clone();
            let work = async {
                tokio::time::sleep(WIPING_DELAY).await;
                if !me.is_usable(&driver) {
                    me.wipe(Some(&driver)).await;
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// Deletes the node's slices, of one driver or of all: nobody can prepare their devices.
    pub async fn wipe(&self, driver: Option<&str>) {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        let mut selector = format!("spec.nodeName={}", self.node_name);
        if let Some(driver) = driver {
            selector = format!("{selector},spec.driver={driver}");
        }
        let listed = ListParams::default().fields(&selector);
        let mut retry = FIRST_RETRY;
        loop {
            match api.delete_collection(&DeleteParams::default(), &listed).await {
                Ok(_) => return,
                Err(error) if error.is_not_found() => return,
                Err(error) => {
                    tracing::debug!(%error, "cannot delete the node's ResourceSlices; trying again")
                }
            }
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = tokio::time::sleep(retry) => {}
            }
            retry = (retry * 2).min(LAST_RETRY);
        }
    }
}

#[async_trait]
impl PluginHandler for Drivers {
    fn validate(&self, plugin: &Plugin) -> Result<(), String> {
        chosen(&plugin.versions).map(|_| ()).map_err(|error| {
            let (name, endpoint) = (&plugin.name, plugin.endpoint.display());
            format!(
                "invalid supported gRPC versions of DRA driver plugin {name} at endpoint {endpoint}: {error}"
            )
        })
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), String> {
        let service = chosen(&plugin.versions)?;
        let Some(me) = self.me.upgrade() else {
            return Err("the kubelet ends".to_owned());
        };
        let (driver, endpoint) = (plugin.name.clone(), plugin.endpoint.clone());
        let stop = self.shutdown.child_token();
        let channel = skiff_devices::channel(&endpoint);
        {
            let mut instances = self.instances.lock();
            // One plugin must not take the endpoint of another.
            if instances
                .iter()
                .any(|one| one.driver == driver && one.endpoint == endpoint)
            {
                return Err(format!(
                    "endpoint {} already registered for DRA driver plugin {driver}",
                    endpoint.display()
                ));
            }
            instances.push(Instance {
                driver: driver.clone(),
                endpoint: endpoint.clone(),
                client: DraClient::new(channel.clone(), service),
                // It has just answered by its other socket.
                reachable: true,
                stop: stop.clone(),
            });
        }
        tokio::spawn(me.clone().watch(driver.clone(), endpoint, stop.clone()));
        tokio::spawn(async move { me.health.follow(&driver, channel, stop).await });
        Ok(())
    }

    async fn deregister(&self, plugin: &Plugin) {
        {
            let mut instances = self.instances.lock();
            instances.retain(|one| {
                let stays = one.driver != plugin.name || one.endpoint != plugin.endpoint;
                if !stays {
                    one.stop.cancel();
                }
                stays
            });
        }
        if !self.is_usable(&plugin.name) {
            self.wipe_later(&plugin.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services() {
        let of =
            |versions: &[&str]| chosen(&versions.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["v1.DRAPlugin", "v1beta1.DRAPlugin"]), Ok(DRA_V1));
        assert_eq!(of(&["v1beta1.DRAPlugin", "v1.DRAPlugin"]), Ok(DRA_V1BETA1));
        assert_eq!(of(&["v9.DRAPlugin", "v1beta1.DRAPlugin"]), Ok(DRA_V1BETA1));
        assert!(of(&[]).unwrap_err().contains("empty list"));
        assert!(of(&["1.0.0"]).unwrap_err().contains("none of services"));
    }
}
