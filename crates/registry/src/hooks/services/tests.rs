//! Services over a store: what writes take and free, by several registries at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use skiff_store::{Embedded, Store};

use super::node_ports::{KEY, PortRange, Record};
use crate::hooks::bootstrap::Advertise;
use crate::{
    Cidr, Context, DeleteOptions, Open, Registry, RegistryConfig, Resource, Write, WriteScope, object,
};

async fn registry(store: &Arc<dyn Store>, cidrs: &[&str]) -> Arc<Registry> {
    let cidrs = cidrs.iter().map(|text| Cidr::parse(text).expect("a CIDR"));
    let registry = Registry::start(RegistryConfig {
        store: store.clone(),
        service_cidrs: cidrs.collect(),
        node_ports: 30000..=30100,
        runtime_config: Default::default(),
    })
    .await
    .expect("starts");
    let advertise = Advertise {
        address: "192.0.2.1".parse().expect("an address"),
        port: 6443,
    };
    registry.bootstrap(advertise).await.expect("bootstraps");
    registry
}

struct Setup {
    registry: Arc<Registry>,
    store: Arc<dyn Store>,
    _dir: tempfile::TempDir,
}

async fn setup(cidrs: &[&str]) -> Setup {
    let dir = tempfile::tempdir().expect("a folder");
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path()).expect("opens"));
    Setup {
        registry: registry(&store, cidrs).await,
        store,
        _dir: dir,
    }
}

fn services(registry: &Registry) -> &Resource {
    registry.resources.get("", "v1", "services").expect("services")
}

async fn create_in(registry: &Registry, name: &str, spec: Value, dry_run: bool) -> Result<Value, String> {
    let mut service =
        json!({"kind": "Service", "apiVersion": "v1", "metadata": {"name": name}, "spec": spec});
    if service["spec"].get("ports").is_none() {
        service["spec"]["ports"] = json!([{"port": 80}]);
    }
    let resource = services(registry);
    resource.strategy.default(&mut service);
    let context = Context::new(dry_run);
    let write = Write {
        context: &context,
        resource,
        namespace: "default",
        gate: &Open,
    };
    let created = registry.create(&write, service);
    created.await.map_err(|status| status.message)
}

impl Setup {
    async fn create(&self, name: &str, spec: Value) -> Result<Value, String> {
        create_in(&self.registry, name, spec, false)
            .await
            .map(|service| service["spec"].clone())
    }

    async fn change(&self, name: &str, change: impl Fn(&mut Value) + Send + Sync) -> Result<Value, String> {
        let mut transform = |current: Option<&Value>| {
            let mut new = current.cloned().unwrap_or_default();
            change(&mut new);
            Ok(new)
        };
        let updated = self
            .registry
            .update(
                &Write {
                    context: &Context::default(),
                    resource: services(&self.registry),
                    namespace: "default",
                    gate: &Open,
                },
                name,
                WriteScope::Main,
                false,
                &mut transform,
            )
            .await;
        updated
            .map(|updated| updated.object["spec"].clone())
            .map_err(|status| status.message)
    }

    async fn delete(&self, name: &str) {
        self.registry
            .delete(
                &Context::default(),
                services(&self.registry),
                "default",
                name,
                &DeleteOptions::default(),
                &Open,
            )
            .await
            .expect("deletes");
    }

    /// The addresses that have an IPAddress, but for that of the API server.
    async fn allocated(&self) -> BTreeSet<String> {
        let found = self.store.range("/registry/ipaddresses/", None, 0, None).await;
        let items = found.expect("lists").items;
        let names = items.iter().filter_map(|item| item.key.rsplit('/').next());
        names
            .filter(|name| *name != "10.0.0.1")
            .map(str::to_owned)
            .collect()
    }

    async fn ports(&self) -> Vec<u16> {
        let (found, _) = self.store.get(KEY).await.expect("reads");
        let record = Record::read(&found.expect("a record").value).expect("reads");
        record.taken().collect()
    }
}

fn addresses(spec: &Value) -> BTreeSet<String> {
    let all = spec["clusterIPs"].as_array().expect("addresses");
    all.iter()
        .filter_map(|address| address.as_str().map(str::to_owned))
        .collect()
}

#[tokio::test]
async fn cluster_ips() {
    let one = setup(&["10.0.0.0/24"]).await;
    let spec = one.create("a", json!({})).await.expect("allocates");
    assert_eq!(spec["clusterIPs"][0], spec["clusterIP"]);
    assert_eq!(spec["ipFamilies"], json!(["IPv4"]));
    assert_eq!(spec["ipFamilyPolicy"], "SingleStack");
    assert_eq!(one.allocated().await, addresses(&spec));
    let headless = json!({"clusterIP": "None", "selector": {"a": "b"}});
    let spec = one.create("b", headless).await.expect("headless");
    assert_eq!(spec["clusterIPs"], json!(["None"]));
    one.create("c", json!({"clusterIP": "10.0.0.10"}))
        .await
        .expect("free");
    let refused = |name: &str, asked: &str, why: &str| {
        Err(format!(
            "Service \"{name}\" is invalid: spec.clusterIPs: Invalid value: [\"{asked}\"]: failed to allocate IP {asked}: {why}"
        ))
    };
    assert_eq!(
        one.create("d", json!({"clusterIP": "10.0.0.10"})).await,
        refused("d", "10.0.0.10", "provided IP is already allocated")
    );
    let other = "the provided network does not match the current range";
    for outside in ["10.0.1.1", "10.0.0.0", "10.0.0.255"] {
        assert_eq!(
            one.create("d", json!({"clusterIP": outside})).await,
            refused("d", outside, other)
        );
    }
    assert!(
        one.create("d", json!({"ipFamilyPolicy": "RequireDualStack"}))
            .await
            .expect_err("single")
            .contains("not configured for dual-stack")
    );
    assert_eq!(one.allocated().await.len(), 2);
    one.delete("a").await;
    one.delete("c").await;
    assert_eq!(one.allocated().await, BTreeSet::new());
}

#[tokio::test]
async fn the_object_of_an_address_is_upstreams() {
    let one = setup(&["10.0.0.0/24"]).await;
    one.create("a", json!({"clusterIP": "10.0.0.10"}))
        .await
        .expect("free");
    let resource = one
        .registry
        .resources
        .get("networking.k8s.io", "v1", "ipaddresses");
    let resource = resource.expect("ipaddresses");
    let found = one.registry.get(resource, "", "10.0.0.10", Default::default());
    let found = found.await.expect("reads").expect("is there");
    assert_eq!(
        found["metadata"]["labels"],
        json!({"ipaddress.kubernetes.io/ip-family": "IPv4", "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io"})
    );
    let parent = json!({"resource": "services", "namespace": "default", "name": "a"});
    assert_eq!(found["spec"]["parentRef"], parent);
    assert_eq!(found["metadata"]["managedFields"][0]["manager"], "kube-apiserver");
    assert!(!object::uid(&found).is_empty());
    assert!(object::metadata(&found, "creationTimestamp").is_some());
}

#[tokio::test]
async fn both_families() {
    let two = setup(&["10.0.0.0/24", "fd00::/112"]).await;
    let dual = json!({"ipFamilyPolicy": "PreferDualStack"});
    let spec = two.create("a", dual.clone()).await.expect("dual");
    assert_eq!(spec["ipFamilies"], json!(["IPv4", "IPv6"]));
    assert_eq!(addresses(&spec).len(), 2);
    assert_eq!(two.allocated().await, addresses(&spec));
    // The first address is free, the second is taken: nothing of it is left.
    let second = spec["clusterIPs"][1].as_str().expect("an address");
    let taken = json!({"ipFamilyPolicy": "RequireDualStack", "clusterIPs": ["10.0.0.77", second]});
    assert!(two.create("b", taken).await.expect_err("taken").contains(second));
    // A name that is taken: the second address was written before, and is taken back.
    let again = two.create("a", dual).await.expect_err("exists");
    assert!(again.contains("already exists"), "{again}");
    assert_eq!(two.allocated().await, addresses(&spec));
    let single = |service: &mut Value| service["spec"]["ipFamilyPolicy"] = json!("SingleStack");
    let spec = two.change("a", single).await.expect("changes");
    assert_eq!(addresses(&spec).len(), 1);
    assert_eq!(two.allocated().await, addresses(&spec));
    let dual = |service: &mut Value| service["spec"]["ipFamilyPolicy"] = json!("RequireDualStack");
    let spec = two.change("a", dual).await.expect("changes");
    assert_eq!(two.allocated().await, addresses(&spec));
    let external = |service: &mut Value| {
        service["spec"] =
            json!({"type": "ExternalName", "externalName": "example.com", "sessionAffinity": "None"});
    };
    two.change("a", external).await.expect("changes");
    assert_eq!(two.allocated().await, BTreeSet::new());
}

#[tokio::test]
async fn node_ports_follow_updates() {
    let all = setup(&["10.0.0.0/24"]).await;
    let asked = json!({"type": "NodePort", "ports": [{"port": 80}]});
    let spec = all.create("s", asked).await.expect("allocates");
    let port = spec["ports"][0]["nodePort"].clone();
    assert_eq!(all.ports().await, [port.as_u64().expect("a port") as u16]);
    // The lower part is left to those who ask.
    assert!(port.as_u64() >= Some(30016), "{port}");
    let next = |service: &mut Value| {
        service["spec"]["ports"][0] = json!({"port": 81, "targetPort": 81, "protocol": "TCP"})
    };
    let spec = all.change("s", next).await.expect("keeps");
    assert_eq!(spec["ports"][0]["nodePort"], port);
    let asked = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
    assert!(
        all.create("t", asked.clone())
            .await
            .expect_err("taken")
            .contains("provided port is already allocated")
    );
    let outside = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 20}]});
    assert!(
        all.create("t", outside)
            .await
            .expect_err("outside")
            .contains("The range of valid ports is 30000-30100")
    );
    let plain = |service: &mut Value| service["spec"]["type"] = json!("ClusterIP");
    all.change("s", plain).await.expect("frees");
    assert!(all.ports().await.is_empty());
    all.create("t", asked).await.expect("free again");
    let local = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"port": 80}]});
    let spec = all.create("u", local).await.expect("allocates");
    assert_eq!(all.ports().await.len(), 3);
    assert!(spec["healthCheckNodePort"].as_u64().is_some());
    all.delete("t").await;
    all.delete("u").await;
    assert!(all.ports().await.is_empty());
    // One that wants none, until it is told otherwise.
    let none =
        json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 80}]});
    all.create("v", none).await.expect("allocates none");
    assert!(all.ports().await.is_empty());
    let wants = |service: &mut Value| service["spec"]["allocateLoadBalancerNodePorts"] = json!(true);
    let spec = all.change("v", wants).await.expect("allocates");
    assert!(spec["ports"][0]["nodePort"].as_u64().is_some());
    assert_eq!(all.ports().await.len(), 1);
}

#[tokio::test]
async fn a_dry_run_takes_nothing() {
    let all = setup(&["10.0.0.0/24"]).await;
    let spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
    let shown = create_in(&all.registry, "s", spec, true).await.expect("is shown");
    assert_eq!(shown["spec"]["clusterIP"], "10.0.0.0");
    assert!(shown["spec"]["ports"][0]["nodePort"].as_u64().is_some());
    assert_eq!(all.allocated().await, BTreeSet::new());
    assert!(all.ports().await.is_empty());
    let outside = create_in(&all.registry, "s", json!({"clusterIP": "10.9.0.1"}), true).await;
    assert!(
        outside
            .expect_err("outside")
            .contains("The range of valid IPs is 10.0.0.0/24")
    );
}

async fn add_range(setup: &Setup, name: &str, cidr: &str) {
    let range = json!({"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1",
        "metadata": {"name": name}, "spec": {"cidrs": [cidr]}});
    setup.registry.ensure(range).await.expect("creates");
}

#[tokio::test]
async fn addresses_come_from_all_ranges_that_are_ready() {
    let one = setup(&["10.0.0.0/30"]).await;
    // Two addresses, one of them the API server's.
    one.create("a", json!({})).await.expect("allocates");
    let full = one.create("b", json!({})).await.expect_err("full");
    assert!(
        full.contains("failed to allocate a serviceIP for Service \"b\": range is full"),
        "{full}"
    );
    add_range(&one, "more", "10.1.0.0/28").await;
    let spec = one.create("b", json!({})).await.expect("allocates");
    assert!(
        spec["clusterIP"]
            .as_str()
            .expect("an address")
            .starts_with("10.1.0.")
    );
    one.create("c", json!({"clusterIP": "10.1.0.9"}))
        .await
        .or_else(|error| {
            // It may have been drawn.
            if error.contains("already allocated") {
                Ok(Value::Null)
            } else {
                Err(error)
            }
        })
        .expect("of the range");
    // One that is being deleted gives no new ones.
    let resource = one
        .registry
        .resources
        .get("networking.k8s.io", "v1", "servicecidrs");
    let resource = resource.expect("servicecidrs");
    let mut hold = |current: Option<&Value>| {
        let mut new = current.cloned().unwrap_or_default();
        object::set(&mut new, "finalizers", json!(["example.com/stay"]));
        Ok(new)
    };
    let context = Context::default();
    let write = Write {
        context: &context,
        resource,
        namespace: "",
        gate: &Open,
    };
    one.registry
        .update(&write, "more", WriteScope::Main, false, &mut hold)
        .await
        .expect("holds");
    let options = DeleteOptions::default();
    one.registry
        .delete(&context, resource, "", "more", &options, &Open)
        .await
        .expect("marks");
    // The cache may be a moment behind.
    let listed = one.registry.list(resource, Default::default());
    listed.await.expect("lists");
    assert!(
        one.create("d", json!({}))
            .await
            .expect_err("full")
            .contains("range is full")
    );
    let asked = one
        .create("d", json!({"clusterIP": "10.1.0.14"}))
        .await
        .expect_err("going");
    assert!(asked.contains("does not match the current range"), "{asked}");
    one.delete("a").await;
    one.create("d", json!({})).await.expect("what was given back");
}

/// Takes ports in the record without a service, as an API server does that ends in between.
async fn leak(setup: &Setup, ports: &[u16]) {
    let range = PortRange::new(30000..=30100);
    let merge = range.merge(ports.to_vec(), Vec::new());
    let op = skiff_store::Op::Merge(merge);
    let write = setup.store.write(KEY, skiff_store::Expect::Any, op, None);
    write.await.expect("writes");
}

#[tokio::test]
async fn leaked_ports_are_freed_after_some_passes() {
    let all = setup(&["10.0.0.0/24"]).await;
    let asked = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30050}]});
    all.create("s", asked).await.expect("allocates");
    leak(&all, &[30001, 30002]).await;
    let other = registry(&all.store, &["10.0.0.0/24"]).await;
    for _ in 0..2 {
        assert_eq!(all.registry.repair_node_ports().await.expect("passes"), []);
        assert_eq!(all.ports().await, [30001, 30002, 30050]);
    }
    // Its service is there at last.
    let late = json!({"type": "NodePort", "ports": [{"port": 80}]});
    all.create("late", late).await.expect("allocates");
    other.repair_node_ports().await.expect("passes");
    all.registry.repair_node_ports().await.expect("passes");
    let ports = all.ports().await;
    assert!(ports.contains(&30050) && ports.len() == 2, "{ports:?}");
    // A record that lacks what services hold is completed.
    let (found, _) = all.store.get(KEY).await.expect("reads");
    let mut record = Record::read(&found.expect("a record").value).expect("reads");
    assert!(record.free(30050));
    let op = skiff_store::Op::Put(record.encode().expect("encodes"));
    all.store
        .write(KEY, skiff_store::Expect::Any, op, None)
        .await
        .expect("writes");
    let findings = other.repair_node_ports().await.expect("passes");
    assert_eq!((findings.len(), findings[0].reason), (1, "PortNotAllocated"));
    assert!(all.ports().await.contains(&30050));
}
