//! Keeps `cluster-info` at a server that lives: machines that join are sent to the address in there, and a server that is
//! gone for good does not change it itself. An address that is no server's own (a load balancer's, or one that an
//! administrator wrote) is left alone.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::PostParams;
use skiff_client::{Action, ErrorExt, Informer, Key, Reconcile};

use super::bootstrap_signer::{MAP, MAP_NAMESPACE};
use crate::csr::server_hosts;
use crate::{Context, Error};

/// An annotation of `cluster-info`: the address of the server that wrote its own into it.
pub const SERVER_ADDRESS: &str = "skiff.io/server-address";

struct ClusterInfo {
    context: Context,
    maps: Informer<ConfigMap>,
    slices: Informer<EndpointSlice>,
}

pub(crate) async fn run(context: Context) {
    let reconciler = Arc::new(ClusterInfo {
        maps: context
            .informers
            .filtered(None, Some(&format!("metadata.name={MAP}"))),
        slices: context
            .informers
            .filtered(Some("kubernetes.io/service-name=kubernetes"), None),
        context: context.clone(),
    });
    let map = || Key::new(MAP_NAMESPACE, MAP);
    context
        .controller("cluster_info", reconciler)
        .watches(
            |r| &r.maps,
            move |_, change| {
                let ours = change.object().metadata.namespace.as_deref() == Some(MAP_NAMESPACE);
                ours.then(map)
            },
        )
        .watches(|r| &r.slices, move |_, _| Some(map()))
        .run()
        .await;
}

/// The map with the address of a living server in place of that of a lost one; `None` if nothing is to be done.
fn plan(map: &ConfigMap, living: &BTreeSet<String>) -> Option<ConfigMap> {
    let own = map.metadata.annotations.as_ref()?.get(SERVER_ADDRESS)?;
    let kubeconfig = map.data.as_ref()?.get("kubeconfig")?;
    let hosts = server_hosts(kubeconfig);
    let [host] = &hosts[..] else { return None };
    if server_hosts(&format!("server: {own}")) != hosts || living.contains(host) {
        return None;
    }
    let other = own.replacen(host.as_str(), living.first()?, 1);
    let mut moved = map.clone();
    let data = moved.data.as_mut()?;
    data.insert("kubeconfig".to_owned(), kubeconfig.replace(own.as_str(), &other));
    let annotations = moved.metadata.annotations.as_mut()?;
    annotations.insert(SERVER_ADDRESS.to_owned(), other);
    Some(moved)
}

impl ClusterInfo {
    /// The addresses of the servers that renew their leases; all are of one family.
    fn living(&self) -> BTreeSet<String> {
        let slices = self.slices.list();
        let slices = slices
            .iter()
            .filter(|slice| slice.metadata.namespace.as_deref() == Some("default"));
        let endpoints = slices.flat_map(|slice| slice.endpoints.iter().flatten());
        endpoints
            .flat_map(|endpoint| endpoint.addresses.iter().cloned())
            .collect()
    }
}

impl Reconcile for ClusterInfo {
    type Key = Key;
    type Error = Error;

    async fn reconcile(&self, _: Key) -> Result<Action, Error> {
        let Some(map) = self.maps.get(MAP_NAMESPACE, MAP) else {
            return Ok(Action::Done);
        };
        let Some(moved) = plan(&map, &self.living()) else {
            return Ok(Action::Done);
        };
        let api: Api<ConfigMap> = Api::namespaced(self.context.client.clone(), MAP_NAMESPACE);
        match api.replace(MAP, &PostParams::default(), &moved).await {
            Ok(_) => Ok(Action::Done),
            // Its change comes back as an event.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn map(own: Option<&str>, server: &str) -> ConfigMap {
        let annotations = own.map(|own| json!({SERVER_ADDRESS: own}));
        let kubeconfig = format!("clusters:\n- name: \"\"\n  cluster:\n    server: {server}\n");
        let map = json!({"metadata": {"name": MAP, "annotations": annotations}, "data": {"kubeconfig": kubeconfig}});
        serde_json::from_value(map).unwrap()
    }

    fn living(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_lost_server_is_replaced_and_nothing_else() {
        let (one, two) = ("https://192.0.2.1:6443", "https://192.0.2.2:6443");
        assert_eq!(
            plan(&map(Some(one), one), &living(&["192.0.2.2", "192.0.2.3"])),
            Some(map(Some(two), two))
        );
        let six = ("https://[fd00::1]:6443", "https://[fd00::2]:6443");
        assert_eq!(
            plan(&map(Some(six.0), six.0), &living(&["fd00::2"])),
            Some(map(Some(six.1), six.1))
        );
        let stays = |map: ConfigMap, addresses: &[&str]| assert_eq!(plan(&map, &living(addresses)), None);
        stays(map(Some(one), one), &["192.0.2.1", "192.0.2.2"]);
        stays(map(Some(one), one), &[]);
        // A load balancer's, and what an administrator wrote.
        stays(map(None, "https://api.example.com:6443"), &["192.0.2.2"]);
        stays(map(Some(one), "https://api.example.com:6443"), &["192.0.2.2"]);
        stays(map(Some("https://192.0.2.10:6443"), one), &["192.0.2.2"]);
    }
}
