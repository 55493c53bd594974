//! The objects that every cluster has from its first moment: namespaces, priority classes, the
//! `kubernetes` service. Missing ones are made at each start, and those that nothing works without now and then, too;
//! changed ones are left as they are, except where the server itself is the owner (what extension API servers check).

use std::net::IpAddr;

use serde_json::{Value, json};
use skiff_meta::Status;

use crate::{Context, Open, Registry, Write, WriteScope, object};

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// Where clients inside the cluster reach the API server.
#[derive(Clone, Copy, Debug)]
pub struct Advertise {
    pub address: IpAddr,
    pub port: u16,
}

impl Registry {
    /// Makes the objects that must be there before anything else works.
    pub async fn bootstrap(&self, advertise: Advertise) -> Result<(), Status> {
        let classes = [
            (
                "system-cluster-critical",
                2_000_000_000,
                "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
            ),
            (
                "system-node-critical",
                2_000_001_000,
                "Used for system critical pods that must not be moved from their current node.",
            ),
        ];
        let classes = classes.map(|(name, value, description)| {
            json!({"kind": "PriorityClass", "apiVersion": "scheduling.k8s.io/v1",
                "metadata": {"name": name}, "value": value, "description": description})
        });
        let today = self.now_text();
        let tracking = json!({"kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"name": "kube-apiserver-legacy-service-account-token-tracking", "namespace": "kube-system"},
            "data": {"since": today.split('T').next().unwrap_or_default()}});
        if advertise.address.is_loopback() {
            tracing::warn!("the API server is advertised on a loopback address: pods cannot reach it");
        }
        let objects = classes
            .into_iter()
            .chain(self.local_api_services())
            .chain([tracking]);
        // Concurrently: the store commits together what waits for it, and a start waits for every commit.
        let network = async {
            // The address of the service is one of the range.
            self.service_cidr().await?;
            self.kubernetes_service(advertise).await
        };
        futures::try_join!(self.namespaces(), self.ensure_all(objects), network)?;
        Ok(())
    }

    /// Makes again what a user may delete, but a cluster cannot do without: the namespaces of the system, and the way to
    /// the API server.
    pub async fn repair(&self, advertise: Advertise) -> Result<(), Status> {
        self.namespaces().await?;
        self.kubernetes_service(advertise).await
    }

    async fn namespaces(&self) -> Result<(), Status> {
        let namespace =
            |name: &str| json!({"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": name}});
        self.ensure_all(NAMESPACES.map(namespace)).await
    }

    async fn ensure_all(&self, objects: impl IntoIterator<Item = Value>) -> Result<(), Status> {
        let ensured = futures::future::join_all(objects.into_iter().map(|object| self.ensure(object)));
        ensured.await.into_iter().collect()
    }

    /// One APIService for each group version that this server serves itself.
    fn local_api_services(&self) -> Vec<Value> {
        let mut seen: Vec<(&str, &str)> = Vec::new();
        let mut objects = Vec::new();
        for facts in self.resources.all().iter().map(|resource| resource.facts) {
            let (group, version) = (facts.group, facts.version);
            // The aggregator does not list itself.
            if seen.contains(&(group, version)) || group == "apiregistration.k8s.io" {
                continue;
            }
            seen.push((group, version));
            let (group_priority, version_priority) = priorities(group, version);
            let mut spec = json!({"version": version, "groupPriorityMinimum": group_priority,
                "versionPriority": version_priority});
            if !group.is_empty() {
                spec["group"] = json!(group);
            }
            objects.push(
                json!({"kind": "APIService", "apiVersion": "apiregistration.k8s.io/v1",
                "metadata": {"name": format!("{version}.{group}"),
                    "labels": {"kube-aggregator.kubernetes.io/automanaged": "onstart"}},
                "spec": spec}),
            );
        }
        objects
    }

    /// The ranges that service addresses come from, as an object.
    async fn service_cidr(&self) -> Result<(), Status> {
        let cidrs = self.services.cidrs();
        if cidrs.is_empty() {
            return Ok(());
        }
        let value = json!({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs}});
        let resource = self.resource_of(&value)?;
        if self.read_stored(&resource.key("", "kubernetes")).await?.is_some() {
            return Ok(());
        }
        self.ensure(value).await?;
        let ready = json!({"conditions": [{"type": "Ready", "status": "True",
            "lastTransitionTime": self.now_text(), "reason": "",
            "message": "Kubernetes default Service CIDR is ready"}]});
        let mut mark = |current: Option<&Value>| {
            let mut current = current.cloned().unwrap_or_default();
            current["status"] = ready.clone();
            Ok(current)
        };
        let context = Context::of_server();
        self.update(
            &Write {
                context: &context,
                resource: &resource,
                namespace: "",
                gate: &Open,
            },
            "kubernetes",
            WriteScope::Status,
            false,
            &mut mark,
        )
        .await
        .map(drop)
    }

    async fn kubernetes_service(&self, advertise: Advertise) -> Result<(), Status> {
        let labels = json!({"component": "apiserver", "provider": "kubernetes"});
        let service = async {
            let Some(address) = self.services.api_server_ip() else {
                return Ok(());
            };
            self.ensure(json!({"kind": "Service", "apiVersion": "v1",
                "metadata": {"name": "kubernetes", "namespace": "default", "labels": labels},
                "spec": {"clusterIP": address.to_string(), "type": "ClusterIP", "sessionAffinity": "None",
                    "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": advertise.port}]}}))
                .await
        };
        // Its endpoints are the living API servers: the server's `hooks::endpoints`.
        service.await
    }

    /// Says in the cluster which authorities client certificates are checked against, so that extension API
    /// servers check theirs against the same.
    pub async fn publish_authorities(
        &self,
        client_ca: &str,
        front_proxy_ca: Option<&str>,
    ) -> Result<(), Status> {
        let mut data = json!({"client-ca-file": client_ca});
        if let Some(ca) = front_proxy_ca {
            data["requestheader-client-ca-file"] = json!(ca);
            for (key, value) in [
                ("requestheader-allowed-names", "[\"front-proxy-client\"]"),
                ("requestheader-extra-headers-prefix", "[\"X-Remote-Extra-\"]"),
                ("requestheader-group-headers", "[\"X-Remote-Group\"]"),
                ("requestheader-username-headers", "[\"X-Remote-User\"]"),
            ] {
                data[key] = json!(value);
            }
        }
        let wanted = json!({"kind": "ConfigMap", "apiVersion": "v1", "data": data,
            "metadata": {"name": "extension-apiserver-authentication", "namespace": "kube-system"}});
        self.own(wanted, "data").await
    }

    /// Creates an object unless there is one of its name.
    pub async fn ensure(&self, mut value: Value) -> Result<(), Status> {
        let resource = self.resource_of(&value)?;
        let namespace = object::namespace(&value).to_string();
        let name = object::name(&value).to_string();
        if self
            .read_stored(&resource.key(&namespace, &name))
            .await?
            .is_some()
        {
            return Ok(());
        }
        resource.strategy.default(&mut value);
        let context = Context::of_server();
        let write = Write {
            context: &context,
            resource: &resource,
            namespace: &namespace,
            gate: &Open,
        };
        let created = self.create(&write, value);
        let Err(status) = created.await else {
            return Ok(());
        };
        // Another server that starts now may have been quicker, and have what this one asked for: its address.
        match self.read_stored(&resource.key(&namespace, &name)).await? {
            Some(_) => Ok(()),
            None => Err(status),
        }
    }

    /// Creates an object, or writes what `merge` makes of the present one and the wanted one.
    pub async fn ensure_merged(
        &self,
        value: Value,
        merge: impl Fn(&Value, &Value) -> Option<Value> + Send + Sync,
    ) -> Result<(), Status> {
        let resource = self.resource_of(&value)?;
        let namespace = object::namespace(&value).to_string();
        let name = object::name(&value).to_string();
        let Some(stored) = self.read_stored(&resource.key(&namespace, &name)).await? else {
            return self.ensure(value).await;
        };
        match resource.read(&stored) {
            Ok(present) if merge(&present, &value).is_none() => return Ok(()),
            Ok(_) => {}
            Err(unreadable) => return leave(&unreadable),
        }
        let mut bring = |current: Option<&Value>| match current {
            Some(current) => Ok(merge(current, &value).unwrap_or_else(|| current.clone())),
            None => Ok(value.clone()),
        };
        self.update(
            &Write {
                context: &Context::of_server(),
                resource: &resource,
                namespace: &namespace,
                gate: &Open,
            },
            &name,
            WriteScope::Main,
            false,
            &mut bring,
        )
        .await
        .map(drop)
    }

    /// Creates an object, or brings one field of the present one up to date.
    async fn own(&self, mut value: Value, field: &str) -> Result<(), Status> {
        self.ensure(value.clone()).await?;
        let resource = self.resource_of(&value)?;
        resource.strategy.default(&mut value);
        let mut bring = |current: Option<&Value>| {
            let mut current = current.cloned().unwrap_or_else(|| value.clone());
            current[field] = value[field].clone();
            if let Some(ports) = value.get("ports") {
                current["ports"] = ports.clone();
            }
            Ok(current)
        };
        let namespace = object::namespace(&value).to_string();
        let name = object::name(&value).to_string();
        let stored = self.read_stored(&resource.key(&namespace, &name)).await?;
        if let Some(Err(unreadable)) = stored.map(|stored| resource.read(&stored)) {
            return leave(&unreadable);
        }
        let context = Context::of_server();
        self.update(
            &Write {
                context: &context,
                resource: &resource,
                namespace: &namespace,
                gate: &Open,
            },
            &name,
            WriteScope::Main,
            true,
            &mut bring,
        )
        .await
        .map(drop)
    }

    fn resource_of(&self, value: &Value) -> Result<std::sync::Arc<crate::Resource>, Status> {
        let (group, version) = split(value.get("apiVersion").and_then(Value::as_str).unwrap_or(""));
        let kind = value.get("kind").and_then(Value::as_str).unwrap_or("");
        let found = self.resources.all().iter().find(|r| {
            r.facts.kind == kind && r.facts.group == group && r.facts.version == version && r.is_stored()
        });
        found
            .cloned()
            .ok_or_else(|| Status::internal(format_args!("no resource of kind {kind} in {group}/{version}")))
    }
}

/// The order of groups and versions in discovery, as upstream's aggregator has it.
pub fn priorities(group: &str, version: &str) -> (i64, i64) {
    let of_group = match group {
        "" => return (18_000, 1),
        // The aggregator's own group comes first, whatever others ask for.
        "apiregistration.k8s.io" => 20_001,
        "apps" => 17_800,
        "events.k8s.io" => 17_750,
        "authentication.k8s.io" => 17_700,
        "authorization.k8s.io" => 17_600,
        "autoscaling" => 17_500,
        "batch" => 17_400,
        "certificates.k8s.io" => 17_300,
        "networking.k8s.io" => 17_200,
        "policy" => 17_100,
        "rbac.authorization.k8s.io" => 17_000,
        "storage.k8s.io" => 16_800,
        "apiextensions.k8s.io" | "admissionregistration.k8s.io" => 16_700,
        "scheduling.k8s.io" => 16_600,
        "coordination.k8s.io" => 16_500,
        "node.k8s.io" => 16_300,
        "discovery.k8s.io" | "resource.k8s.io" => 16_200,
        "flowcontrol.apiserver.k8s.io" => 16_100,
        "storagemigration.k8s.io" => 15_800,
        _ => 1_000,
    };
    let of_version = match (group, version) {
        ("autoscaling", "v2") => 30,
        ("flowcontrol.apiserver.k8s.io" | "resource.k8s.io", "v1") => 21,
        ("certificates.k8s.io" | "storagemigration.k8s.io", "v1beta1") => 9,
        ("scheduling.k8s.io", "v1alpha2") => 2,
        _ => 15,
    };
    (of_group, of_version)
}

/// The server must start although a bootstrap object is damaged: only a running one can delete it.
fn leave(unreadable: &skiff_cache::Unreadable) -> Result<(), Status> {
    tracing::error!(%unreadable, "a bootstrap object cannot be read and is left as it is");
    Ok(())
}

fn split(api_version: &str) -> (&str, &str) {
    api_version.rsplit_once('/').unwrap_or(("", api_version))
}
