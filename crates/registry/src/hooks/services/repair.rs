//! Compares the record of node ports with what the stored services hold. What services hold and the record lacks is added
//! at once. What the record has and no service holds may be a service's that another server is about to write (upstream's
//! takes the port first): it is freed when several passes in a row found it so.

use std::collections::{BTreeSet, HashMap};

use skiff_meta::Status;
use skiff_store::{Expect, Op, Outcome};

use super::node_ports::{self, PortRange, Record};
use super::ports::node_ports as ports_of;
use crate::{Registry, errors, object};

/// COMPAT: upstream's number.
const PASSES: u32 = 3;
const ATTEMPTS: usize = 16;

/// What is wrong with a service, for an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub reason: &'static str,
    pub message: String,
}

/// How many passes in a row found that nobody holds a port.
#[derive(Default)]
pub struct PortRepair {
    leaks: HashMap<u16, u32>,
}

impl PortRepair {
    /// One pass. Several servers may make theirs at the same time.
    pub async fn pass(&mut self, registry: &Registry) -> Result<Vec<Finding>, Status> {
        for _ in 0..ATTEMPTS {
            if let Some((leaks, findings)) = self.try_pass(registry).await? {
                self.leaks = leaks;
                return Ok(findings);
            }
        }
        Err(Status::internal("the record of node ports changes all the time"))
    }

    /// `None`: somebody else changed the record meanwhile.
    async fn try_pass(
        &self,
        registry: &Registry,
    ) -> Result<Option<(HashMap<u16, u32>, Vec<Finding>)>, Status> {
        let Some(resource) = registry.resources.get("", "v1", "services") else {
            return Ok(Some(Default::default()));
        };
        let range = &registry.services.ports;
        // First the record: a service whose port is in it now may be in the list below, but none whose port is not.
        let (found, _) = registry.store.get(node_ports::KEY).await.map_err(errors::store)?;
        let stored = match found.as_ref().map(|found| Record::read(&found.value)) {
            Some(Ok(record)) => record,
            // The server must start, and what cannot be read is not overwritten: another server may be able to.
            Some(Err(error)) => {
                tracing::error!(
                    error,
                    "cannot read the record of node ports: none can be allocated"
                );
                return Ok(Some((self.leaks.clone(), Vec::new())));
            }
            None => Record::empty(range),
        };
        let listed = registry.store.range(&resource.prefix, None, 0, None).await;
        let mut rebuilt = Record::empty(range);
        let (mut findings, mut held, mut all_readable) = (Vec::new(), BTreeSet::new(), true);
        for item in listed.map_err(errors::store)?.items {
            let service = match resource.read(&item) {
                Ok(service) => service,
                Err(unreadable) => {
                    tracing::error!(%unreadable, "cannot read a service: no node port is freed");
                    all_readable = false;
                    continue;
                }
            };
            for port in ports_of(&service) {
                held.insert(port);
                let problem = judge(range, &stored, &mut rebuilt, port, found.is_some());
                findings.extend(problem.map(|(reason, message)| Finding {
                    namespace: object::namespace(&service).to_owned(),
                    name: object::name(&service).to_owned(),
                    uid: object::uid(&service).to_owned(),
                    reason,
                    message,
                }));
            }
        }
        let mut leaks = HashMap::new();
        for port in stored.taken().filter(|port| !held.contains(port)) {
            let passes = 1 + self.leaks.get(&port).copied().unwrap_or(0);
            if passes >= PASSES && all_readable {
                tracing::warn!(port, "no service holds this node port: freeing it");
                continue;
            }
            leaks.insert(port, passes);
            rebuilt.take(port);
        }
        let rebuilt = stored.replaced(rebuilt);
        let Some(bytes) = rebuilt.encode() else {
            return Err(Status::internal("cannot encode the record of node ports"));
        };
        let expect = match &found {
            Some(found) if found.value == bytes => return Ok(Some((leaks, findings))),
            Some(found) => Expect::Revision(found.mod_revision),
            None => Expect::Absent,
        };
        let written = registry
            .store
            .write(node_ports::KEY, expect, Op::Put(bytes), None);
        Ok(match written.await.map_err(errors::store)? {
            Outcome::Done { .. } => Some((leaks, findings)),
            Outcome::Conflict { .. } => None,
        })
    }
}

/// Takes a port that a service holds; what is wrong with it.
fn judge(
    range: &PortRange,
    stored: &Record,
    rebuilt: &mut Record,
    port: u16,
    known: bool,
) -> Option<(&'static str, String)> {
    if !range.contains(port) {
        let message = format!("Port {port} is not within the port range {range}; please recreate service");
        return Some(("PortOutOfRange", message));
    }
    if !rebuilt.take(port) {
        let message = format!("Port {port} was assigned to multiple services; please recreate service");
        return Some(("PortAlreadyAllocated", message));
    }
    // A new record has none.
    (known && !stored.has(port)).then(|| {
        let message = format!("Port {port} is not allocated; repairing");
        ("PortNotAllocated", message)
    })
}
