//! Dynamic resources on the node: drivers prepare the devices of a pod's claims before its sandbox is made, the containers get
//! what they name (by CDI), and drivers undo it when the last pod of a claim has ended.

mod drivers;
mod health;
mod record;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use parking_lot::Mutex;
use skiff_devices::{DraClient, Status};
use tokio_util::sync::CancellationToken;

use crate::objects::error_message;
use crate::pods;
use record::{Claim, Record, key};

pub use drivers::{DRA_PLUGIN, Drivers};
pub use record::Device;

/// Upstream's limit for a call to a driver.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

pub struct Dra {
    client: Client,
    file: PathBuf,
    pub drivers: Arc<Drivers>,
    /// A leaf lock.
    record: Mutex<Record>,
    /// One pod at a time talks with drivers: preparing and undoing must not cross. Taken before `record`.
    turn: tokio::sync::Mutex<()>,
}

/// A claim of a pod.
struct Used<'a> {
    name: String,
    /// It was made for the pod, and must be its own.
    generated: bool,
    /// In `spec.resourceClaims`; none of the claim for extended resources.
    entry: Option<&'a str>,
}

/// The pod's claims. An entry that needs none is left out.
fn used(pod: &Pod) -> Result<Vec<Used<'_>>, String> {
    let mut found = Vec::new();
    let entries = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    for entry in entries {
        let statuses = pod
            .status
            .iter()
            .flat_map(|status| status.resource_claim_statuses.iter().flatten());
        let mut statuses = statuses.filter(|status| status.name == entry.name);
        let (name, generated) = match (&entry.resource_claim_name, statuses.next()) {
            (Some(name), _) => (name.clone(), false),
            (None, Some(status)) => match &status.resource_claim_name {
                Some(name) => (name.clone(), true),
                None => continue,
            },
            (None, None) => {
                return Err(format!(
                    "pod {:?}: ResourceClaim not created yet for pod claim {:?}",
                    pods::full_name(pod),
                    entry.name
                ));
            }
        };
        let entry = Some(entry.name.as_str());
        found.push(Used {
            name,
            generated,
            entry,
        });
    }
    if let Some(extended) = pod
        .status
        .as_ref()
        .and_then(|status| status.extended_resource_claim_status.as_ref())
    {
        found.push(Used {
            name: extended.resource_claim_name.clone(),
            generated: false,
            entry: None,
        });
    }
    Ok(found)
}

/// The claims that a container uses, with the request of each; an empty request is all of the claim.
fn used_by<'a>(pod: &'a Pod, container: &'a Container) -> Vec<(String, &'a str)> {
    let wanted: Vec<_> = { container.resources.iter() }
        .flat_map(|resources| resources.claims.iter().flatten())
        .collect();
    let mut found = Vec::new();
    for used in used(pod).unwrap_or_default() {
        match used.entry {
            Some(entry) => {
                let requests = wanted.iter().filter(|claim| claim.name == entry);
                found.extend(
                    requests.map(|claim| (used.name.clone(), claim.request.as_deref().unwrap_or_default())),
                );
            }
            None => {
                let status = pod
                    .status
                    .as_ref()
                    .and_then(|status| status.extended_resource_claim_status.as_ref());
                let mappings = status.into_iter().flat_map(|status| &status.request_mappings);
                let own = mappings.filter(|mapping| mapping.container_name == container.name);
                found.extend(own.map(|mapping| (used.name.clone(), mapping.request_name.as_str())));
            }
        }
    }
    found
}

async fn call<T>(name: &str, call: impl Future<Output = Result<T, Status>>) -> Result<T, String> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(format!(
            "{name}: rpc error: code = {:?} desc = {}",
            status.code(),
            status.message()
        )),
        Err(_) => Err(format!(
            "{name}: rpc error: code = DeadlineExceeded desc = context deadline exceeded"
        )),
    }
}

impl Dra {
    /// With what an earlier process prepared.
    pub fn restored(root: &Path, client: Client, node_name: &str, shutdown: CancellationToken) -> Self {
        let file = root.join("dra_claims.json");
        let record = Record::load(&file).unwrap_or_else(|error| {
            tracing::error!(%error, file = %file.display(), "cannot read which resource claims are prepared; drivers will not be asked to undo it");
            Record::default()
        });
        Dra {
            drivers: Drivers::new(client.clone(), node_name, shutdown),
            client,
            file,
            record: Mutex::new(record),
            turn: tokio::sync::Mutex::default(),
        }
    }

    fn save(&self, record: &Record) -> Result<(), String> {
        record
            .save(&self.file)
            .map_err(|error| format!("checkpoint ResourceClaim state: {error}"))
    }

    /// What the pod may use, with the drivers of each claim; nothing is changed yet, so that a pod that fails here can go.
    async fn validated(&self, pod: &Pod) -> Result<Vec<(Claim, BTreeMap<String, DraClient>)>, String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), pods::namespace(pod));
        let uid = pods::uid(pod);
        let mut claims = Vec::new();
        for used in used(pod)? {
            let name = &used.name;
            let read = api.get(name).await;
            let object =
                read.map_err(|error| format!("fetch ResourceClaim {name}: {}", error_message(&error)))?;
            let mut owners = object.metadata.owner_references.iter().flatten();
            if used.generated && !owners.any(|owner| owner.controller == Some(true) && owner.uid == uid) {
                return Err(format!(
                    "ResourceClaim {}/{name} was not created for pod {} (pod is not owner)",
                    pods::namespace(pod),
                    pods::full_name(pod)
                ));
            }
            let status = object.status.as_ref();
            let mut reserved = status
                .into_iter()
                .flat_map(|status| status.reserved_for.iter().flatten());
            if !reserved.any(|consumer| consumer.uid == uid) {
                return Err(format!(
                    "pod {} ({uid}) is not allowed to use ResourceClaim {name} ({})",
                    pods::name(pod),
                    object.metadata.uid.as_deref().unwrap_or_default()
                ));
            }
            let claim = Claim::new(&object)?;
            let mut clients = BTreeMap::new();
            for driver in claim.devices.keys() {
                clients.insert(driver.clone(), self.drivers.get(driver)?);
            }
            claims.push((claim, clients));
        }
        Ok(claims)
    }

    /// Has the drivers prepare the devices of the pod's claims. The error is for an event.
    pub async fn prepare(&self, pod: &Pod) -> Result<(), String> {
        if used(pod).is_ok_and(|used| used.is_empty()) {
            return Ok(());
        }
        let prepared = self.prepare_claims(pod).await;
        prepared.map_err(|error| format!("prepare dynamic resources: {error}"))
    }

    async fn prepare_claims(&self, pod: &Pod) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let claims = self.validated(pod).await?;
        let mut batches: BTreeMap<String, (DraClient, Vec<Claim>)> = BTreeMap::new();
        {
            let mut record = self.record.lock();
            for (claim, clients) in claims {
                let known = record.claims.entry(claim.key()).or_insert_with(|| claim.clone());
                if known.uid != claim.uid {
                    return Err(format!(
                        "old ResourceClaim with same name {} and different UID {} still exists (previous pod force-deleted?!)",
                        claim.name, known.uid
                    ));
                }
                known.pods.insert(pods::uid(pod).to_owned());
                if known.prepared {
                    continue;
                }
                for (driver, client) in clients {
                    let (_, batch) = batches.entry(driver).or_insert_with(|| (client, Vec::new()));
                    batch.push(claim.clone());
                }
            }
            // From here on somebody will ask the drivers to undo it, whatever happens.
            self.save(&record)?;
        }
        for (driver, (client, batch)) in &batches {
            let wire = batch.iter().map(Claim::to_wire).collect();
            let mut answer = call("NodePrepareResources", client.prepare(wire)).await?;
            for claim in batch {
                let Some(result) = answer.claims.remove(&claim.uid) else {
                    return Err("NodePrepareResources skipped 1 ResourceClaims".to_owned());
                };
                if !result.error.is_empty() {
                    return Err(format!(
                        "NodePrepareResources failed for ResourceClaim {}: {}",
                        claim.name, result.error
                    ));
                }
                let devices = result.devices.into_iter().map(Device::from).collect();
                if let Some(known) = self.record.lock().claims.get_mut(&claim.key()) {
                    known.devices.insert(driver.clone(), devices);
                }
            }
            if let Some(unknown) = answer.claims.keys().next() {
                return Err(format!(
                    "NodePrepareResources returned result for unknown claim UID {unknown}"
                ));
            }
        }
        let mut record = self.record.lock();
        for claim in batches.values().flat_map(|(_, batch)| batch) {
            if let Some(known) = record.claims.get_mut(&claim.key()) {
                known.prepared = true;
            }
        }
        self.save(&record)
    }

    /// Has the drivers undo what was prepared for the pod alone. Can be repeated.
    pub async fn unprepare(&self, uid: &str) -> Result<(), String> {
        let uses = |claim: &Claim| claim.pods.contains(uid);
        if !self.record.lock().claims.values().any(uses) {
            return Ok(());
        }
        let undone = self.unprepare_claims(uid).await;
        undone.map_err(|error| format!("unprepare dynamic resources: {error}"))
    }

    async fn unprepare_claims(&self, uid: &str) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        let alone: Vec<String> = {
            let mut record = self.record.lock();
            for claim in record.claims.values_mut().filter(|claim| claim.pods.len() > 1) {
                claim.pods.remove(uid);
            }
            let own = record.claims.values().filter(|claim| claim.pods.contains(uid));
            own.map(|claim| {
                for driver in claim.devices.keys() {
                    batches.entry(driver.clone()).or_default().push(claim.clone());
                }
                claim.key()
            })
            .collect()
        };
        for (driver, batch) in batches {
            let client = self.drivers.get(&driver)?;
            let wire = batch.iter().map(Claim::to_wire).collect();
            let mut answer = call("NodeUnprepareResources", client.unprepare(wire)).await?;
            for claim in batch {
                let Some(result) = answer.claims.remove(&claim.uid) else {
                    return Err("NodeUnprepareResources skipped 1 ResourceClaims".to_owned());
                };
                if !result.error.is_empty() {
                    return Err(format!(
                        "NodeUnprepareResources failed for ResourceClaim {}: {}",
                        claim.name, result.error
                    ));
                }
            }
        }
        let mut record = self.record.lock();
        record.claims.retain(|key, _| !alone.contains(key));
        self.save(&record)
    }

    /// The pods for which something is prepared.
    pub fn pods(&self) -> Vec<String> {
        let record = self.record.lock();
        let pods = record
            .claims
            .values()
            .flat_map(|claim| claim.pods.iter().cloned());
        pods.collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// The CDI devices of a container.
    pub fn cdi_devices(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, String> {
        let record = self.record.lock();
        let mut names: Vec<String> = Vec::new();
        for (claim, request) in used_by(pod, container) {
            let Some(known) = record.claims.get(&key(pods::namespace(pod), &claim)) else {
                return Err(format!(
                    "internal error: unable to get claim info for ResourceClaim {claim} in namespace {}",
                    pods::namespace(pod)
                ));
            };
            for name in known.cdi(request) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        Ok(names)
    }

    /// The devices that a container uses: claim, driver and device.
    pub fn devices(&self, pod: &Pod, container: &Container) -> Vec<(String, String, Device)> {
        let record = self.record.lock();
        let mut found = Vec::new();
        for (claim, request) in used_by(pod, container) {
            let known = record.claims.get(&key(pods::namespace(pod), &claim));
            for (driver, devices) in known.into_iter().flat_map(|known| &known.devices) {
                for device in devices.iter().filter(|device| device.serves(request)) {
                    let one = (claim.clone(), driver.clone(), device.clone());
                    if !found.contains(&one) {
                        found.push(one);
                    }
                }
            }
        }
        found
    }

    /// The devices of an entry of the pod's `resourceClaims`, with their drivers.
    pub fn devices_of(&self, pod: &Pod, entry: &str, request: &str) -> Vec<(String, Device)> {
        let used = used(pod).unwrap_or_default();
        let Some(used) = used.iter().find(|used| used.entry == Some(entry)) else {
            return Vec::new();
        };
        let record = self.record.lock();
        let known = record.claims.get(&key(pods::namespace(pod), &used.name));
        let devices = known.into_iter().flat_map(|known| &known.devices);
        devices
            .flat_map(|(driver, devices)| {
                let serving = devices.iter().filter(|device| device.serves(request));
                serving.map(|device| (driver.clone(), device.clone()))
            })
            .collect()
    }

    pub fn health(&self) -> &tokio::sync::Notify {
        &self.drivers.health.changed
    }

    /// Whether a device is healthy, if that is known, and what its driver says about it.
    pub fn health_of(&self, driver: &str, device: &Device) -> (Option<bool>, Option<String>) {
        self.drivers.health.of(driver, &device.pool, &device.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn claims_of_containers() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {
            "resourceClaims": [{"name": "a", "resourceClaimName": "mine"}, {"name": "b", "resourceClaimTemplateName": "t"},
                {"name": "c", "resourceClaimTemplateName": "t"}],
            "containers": [
                {"name": "x", "resources": {"claims": [{"name": "a"}, {"name": "b", "request": "r"}, {"name": "c"}]}},
                {"name": "y", "resources": {"requests": {"example.com/gpu": "1"}}}, {"name": "z"}]},
            "status": {"resourceClaimStatuses": [{"name": "b", "resourceClaimName": "made"}, {"name": "c"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "extended", "requestMappings": [
                    {"containerName": "y", "resourceName": "example.com/gpu", "requestName": "container-1-request-0"}]}}}))
        .unwrap();
        let names: Vec<(String, bool)> = used(&pod)
            .unwrap()
            .into_iter()
            .map(|one| (one.name, one.generated))
            .collect();
        let expected = [("mine", false), ("made", true), ("extended", false)];
        assert_eq!(
            names,
            expected.map(|(name, generated)| (name.to_owned(), generated))
        );
        let of = |number: usize| used_by(&pod, &pod.spec.as_ref().unwrap().containers[number]);
        assert_eq!(of(0), [("mine".to_owned(), ""), ("made".to_owned(), "r")]);
        assert_eq!(of(1), [("extended".to_owned(), "container-1-request-0")]);
        assert!(of(2).is_empty());
        let mut waiting = pod.clone();
        waiting.status = None;
        assert!(used(&waiting).is_err_and(|error| error.contains("ResourceClaim not created yet")));
    }

    #[test]
    fn devices_serve_requests() {
        let claim = Claim {
            devices: [(
                "d".to_owned(),
                vec![
                    Device {
                        requests: vec!["r".to_owned()],
                        cdi: vec!["d/x=0".to_owned()],
                        ..Device::default()
                    },
                    Device {
                        cdi: vec!["d/x=all".to_owned()],
                        ..Device::default()
                    },
                ],
            )]
            .into(),
            ..Claim::default()
        };
        assert_eq!(claim.cdi(""), ["d/x=0", "d/x=all"]);
        assert_eq!(claim.cdi("r"), ["d/x=0", "d/x=all"]);
        assert_eq!(claim.cdi("r/sub"), ["d/x=0", "d/x=all"]);
        assert_eq!(claim.cdi("other"), ["d/x=all"]);
    }
}
