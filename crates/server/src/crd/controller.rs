//! Follows the definitions. Names are settled in the order in which definitions come; a definition whose
//! names are accepted is served first and called established then, so that whoever waits for the
//! condition can go on at once.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use serde_json::Value;
use sha2::{Digest, Sha256};
use skiff_meta::Status;
use skiff_registry::{Customs, EventKind, ReadAt, Resource, WatchFrom, WatchOptions, encode, object};

use super::api_services::ApiServices;
use super::convert::Webhook;
use super::definition::{Definition, Names, condition};
use super::names::{self, Taken};
use super::{CLEANUP_FINALIZER, CustomVersion, GROUP, PLURAL, facts, retire};
use crate::hooks::loopback::Loopback;
use crate::server::Inner;

/// What a definition brought into service.
pub(super) struct Installed {
    /// Of the spec that it was made from; another makes it anew.
    digest: [u8; 32],
    names: Names,
    terminating: bool,
    /// The version of the definition that brought the spec.
    revision: i64,
    /// The version that was looked at last: it need not be again.
    seen: i64,
    resources: Vec<Arc<Resource>>,
    /// The version that objects are stored in, served or not.
    pub stored: Option<Arc<Resource>>,
}

pub(super) struct Controller {
    pub inner: Arc<Inner>,
    pub definitions: Arc<Resource>,
    known: HashMap<String, Value>,
    installed: HashMap<String, Installed>,
    /// Their resources, in the order of discovery but for the last that came.
    served: Vec<Arc<Resource>>,
    /// Definitions whose objects are being removed, by uid.
    retiring: HashMap<String, tokio::task::JoinHandle<()>>,
    api_services: ApiServices,
    /// Caches to let go of, with the revision from which on they may stay.
    stale: Vec<(String, i64)>,
    /// What it has seen of the definitions.
    revision: i64,
}

/// What the condition of a definition says that is not served.
const NO_ROOM: &str = "too many definitions with different names were made since the server started; it serves this one after a restart";

/// What the controller is called as a supervised task.
const TASK: &str = "custom-resource-definitions";
/// Before the controller goes on after it failed.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(200);

/// Serves what is defined already, then follows what changes for as long as the server runs.
pub async fn start(inner: &Arc<Inner>) -> Result<(), Status> {
    let Some(definitions) = inner.registry.resources.get(GROUP, "v1", PLURAL).cloned() else {
        return Ok(());
    };
    let mut controller = Controller {
        inner: inner.clone(),
        definitions,
        known: HashMap::new(),
        installed: HashMap::new(),
        served: Vec::new(),
        retiring: HashMap::new(),
        api_services: ApiServices::default(),
        stale: Vec::new(),
        revision: 0,
    };
    controller.list().await?;
    for definition in controller.known.values().cloned().collect::<Vec<_>>() {
        if condition(&definition, "Established") {
            let install = AssertUnwindSafe(|| {
                if let Err(error) = controller.install(&definition) {
                    let name = object::name(&definition);
                    tracing::error!(%error, name, "cannot serve a custom resource definition");
                }
            });
            report_panic(object::name(&definition), std::panic::catch_unwind(install));
        }
    }
    controller.publish();
    let controller = Arc::new(tokio::sync::Mutex::new(controller));
    let mut starts = 0;
    skiff_supervise::keep(TASK, &inner.shutdown, move || {
        let controller = controller.clone();
        starts += 1;
        let again = starts > 1;
        async move {
            let mut controller = controller.lock().await;
            if again {
                controller.start_over().await;
            }
            loop {
                controller.run().await;
                controller.start_over().await;
            }
        }
    });
    Ok(())
}

/// A panic ends the reconcile of one definition, never the controller.
fn report_panic(name: &str, outcome: std::thread::Result<()>) {
    if let Err(panic) = outcome {
        let text = skiff_supervise::panic_text(panic.as_ref());
        tracing::error!(panic = text, name, "a custom resource definition panicked");
        skiff_supervise::failed(TASK, &format!("{name}: panicked: {text}"));
    }
}

impl Controller {
    async fn list(&mut self) -> Result<(), Status> {
        let listed = self.inner.registry.list_readable(&self.definitions).await?;
        self.known.clear();
        for entry in &listed.items {
            let value = encode::decode(&entry.bytes)?;
            self.known.insert(object::name(&value).to_owned(), value);
        }
        self.revision = listed.revision;
        Ok(())
    }

    /// Looks at everything anew, after a pause.
    async fn start_over(&mut self) {
        tokio::time::sleep(PAUSE).await;
        if let Err(status) = self.list().await {
            tracing::warn!(%status, "cannot list custom resource definitions");
            return;
        }
        self.forget_gone();
    }

    /// Follows the definitions until they cannot be followed.
    async fn run(&mut self) {
        let shutdown = self.inner.shutdown.clone();
        self.reconcile_all().await;
        while !shutdown.is_cancelled() {
            let options = WatchOptions {
                from: WatchFrom::After(self.revision),
                ..WatchOptions::default()
            };
            let mut watcher = match self.inner.registry.watch(&self.definitions, options).await {
                Ok(watcher) => watcher,
                Err(status) => {
                    tracing::warn!(%status, "cannot follow custom resource definitions");
                    return;
                }
            };
            loop {
                let event = tokio::select! {
                    event = watcher.next() => event,
                    () = shutdown.cancelled() => return,
                };
                let Some(event) = event else { break };
                self.revision = event.revision;
                let Some(entry) = &event.entry else { continue };
                let Ok(value) = encode::decode(&entry.bytes) else {
                    continue;
                };
                let name = object::name(&value).to_owned();
                if event.kind == EventKind::Deleted {
                    self.known.remove(&name);
                    self.remove(&name);
                    self.api_services.sync(&self.inner).await;
                    // Names that were taken may be free now.
                    self.reconcile_group(&value).await;
                } else {
                    self.known.insert(name.clone(), value);
                    self.reconcile(&name).await;
                }
            }
        }
    }

    fn forget_gone(&mut self) {
        let gone: Vec<String> = self
            .installed
            .keys()
            .filter(|name| !self.known.contains_key(*name))
            // A definition that cannot be read is not gone.
            .filter(|name| {
                let key = self.definitions.key("", name);
                !self.inner.registry.is_unreadable(&self.definitions, &key)
            })
            .cloned()
            .collect();
        for name in gone {
            self.remove(&name);
        }
    }

    async fn reconcile_all(&mut self) {
        self.api_services.sync(&self.inner).await;
        for name in self.known.keys().cloned().collect::<Vec<_>>() {
            self.reconcile(&name).await;
        }
    }

    async fn reconcile_group(&mut self, gone: &Value) {
        let group = object::at_str(gone, &["spec", "group"]);
        let names: Vec<String> = self
            .known
            .iter()
            .filter(|(_, other)| object::at_str(other, &["spec", "group"]) == group)
            .filter(|(_, other)| !condition(other, "NamesAccepted"))
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            self.reconcile(&name).await;
        }
    }

    /// The names that other definitions of the group hold.
    fn taken(&self, definition: &Value) -> Taken {
        let group = object::at_str(definition, &["spec", "group"]);
        let mut taken = Taken::default();
        for other in self.known.values() {
            if object::name(other) == object::name(definition)
                || object::at_str(other, &["spec", "group"]) != group
            {
                continue;
            }
            let Some(accepted) = object::at(other, &["status", "acceptedNames"]) else {
                continue;
            };
            let names = Names::read(accepted);
            taken.resources.extend([names.plural, names.singular]);
            taken.resources.extend(names.short_names);
            taken.kinds.extend([names.kind, names.list_kind]);
        }
        taken.resources.retain(|name| !name.is_empty());
        taken.kinds.retain(|name| !name.is_empty());
        taken
    }

    /// Brings one definition to where it should be.
    async fn reconcile(&mut self, name: &str) {
        let outcome = AssertUnwindSafe(self.reconcile_one(name)).catch_unwind().await;
        report_panic(name, outcome);
    }

    async fn reconcile_one(&mut self, name: &str) {
        let Some(definition) = self.known.get(name).cloned() else {
            return;
        };
        let names_of = |definition: &Value, path: [&str; 2]| object::at(definition, &path).map(Names::read);
        let unsettled = |definition: &Value| {
            names_of(definition, ["spec", "names"]) != names_of(definition, ["status", "acceptedNames"])
        };
        let no_room = AtomicBool::new(false);
        let taken = unsettled(&definition).then(|| self.taken(&definition));
        let settled = |definition: &mut Value, now: &str| {
            // Names that are accepted already are not looked at again, whoever wrote the conditions.
            let accepted = match (unsettled(definition), &taken) {
                (false, _) => condition(definition, "NamesAccepted"),
                (true, Some(taken)) => names::settle(definition, taken, now),
                // Other names have come since: their event is on its way.
                (true, None) => return,
            };
            names::approval(definition, now);
            if !accepted || condition(definition, "Established") {
                return;
            }
            let (status, reason, message) = match no_room.load(Ordering::Relaxed) {
                true => ("False", "NoRoom", NO_ROOM),
                false => (
                    "True",
                    "InitialNamesAccepted",
                    "the initial names have been accepted",
                ),
            };
            names::set(definition, "Established", status, reason, message, now);
        };
        let now = skiff_meta::time::format_seconds(self.inner.registry.now());
        let mut wanted = definition.clone();
        settled(&mut wanted, &now);
        if condition(&wanted, "Established") {
            match self.install(&wanted) {
                Ok(false) => {}
                Ok(true) => {
                    self.publish();
                    self.api_services.sync(&self.inner).await;
                }
                Err(error) => {
                    tracing::error!(%error, name, "cannot serve a custom resource definition");
                    no_room.store(true, Ordering::Relaxed);
                    wanted = definition.clone();
                    settled(&mut wanted, &now);
                }
            }
        }
        if wanted.get("status") != definition.get("status") {
            let written = self
                .write(name, object::uid(&definition), &mut |mut current| {
                    settled(&mut current, &now);
                    current
                })
                .await;
            match written {
                Ok(written) => drop(self.known.insert(name.to_owned(), written)),
                Err(status) if status.code == 404 || status.code == 409 => {}
                Err(status) => tracing::warn!(%status, name, "cannot write the status of a definition"),
            }
        }
        if object::deleting(&definition)
            && object::finalizers(&definition)
                .iter()
                .any(|f| f == CLEANUP_FINALIZER)
        {
            self.retire(&definition);
        }
    }

    /// Changes the status of a definition.
    async fn write(
        &self,
        name: &str,
        uid: &str,
        change: &mut (dyn FnMut(Value) -> Value + Send),
    ) -> Result<Value, Status> {
        write(&self.inner, &self.definitions, name, uid, change).await
    }

    fn retire(&mut self, definition: &Value) {
        self.retiring.retain(|_, task| !task.is_finished());
        let (uid, name) = (
            object::uid(definition).to_owned(),
            object::name(definition).to_owned(),
        );
        if self.retiring.contains_key(&uid) {
            return;
        }
        let stored = self
            .installed
            .get(&name)
            .and_then(|installed| installed.stored.clone());
        let (inner, definitions, of) = (self.inner.clone(), self.definitions.clone(), uid.clone());
        let task = skiff_supervise::finished("custom-resource-retirement", move || {
            let (inner, definitions) = (inner.clone(), definitions.clone());
            retire::run(inner, definitions, name.clone(), of.clone(), stored.clone())
        });
        self.retiring.insert(uid, tokio::spawn(task));
    }

    /// Makes the resources of a definition, unless it has them already: then false. If there is no room for new
    /// ones, what was served before goes on being served.
    fn install(&mut self, value: &Value) -> Result<bool, facts::NoRoom> {
        let name = object::name(value).to_owned();
        let accepted = object::at(value, &["status", "acceptedNames"]);
        let names = accepted.map(Names::read).unwrap_or_default();
        let terminating = condition(value, "Terminating");
        let revision = object::resource_version(value).parse().unwrap_or(0);
        let alike = |known: &Installed| known.names == names && known.terminating == terminating;
        let known = self.installed.get_mut(&name);
        if known
            .as_ref()
            .is_some_and(|known| known.seen == revision && alike(known))
        {
            return Ok(false);
        }
        let digest = Sha256::digest(value.get("spec").map(Value::to_string).unwrap_or_default()).into();
        let mut since = revision;
        if let Some(known) = known
            && known.digest == digest
            && known.names == names
        {
            if known.terminating == terminating {
                known.seen = revision;
                return Ok(false);
            }
            since = known.revision;
        }
        // Copies the schemas: not for nothing.
        let definition = Definition::read(value);
        let webhook = definition
            .webhook
            .as_ref()
            .map(|conversion| Arc::new(Webhook::new(self.inner.registry.clone(), conversion)));
        let definition = Arc::new(definition);
        let mut resources = Vec::new();
        let mut stored = None;
        for (at, version) in definition.versions.iter().enumerate() {
            let is_stored = version.name == definition.stored;
            if !version.served && !is_stored {
                continue;
            }
            let Some(row) = facts::row(&definition, version)? else {
                continue;
            };
            let custom = CustomVersion::new(definition.clone(), at, webhook.clone(), since);
            let resource = Arc::new(Resource::custom(row, Arc::new(custom)));
            if is_stored {
                stored = Some(resource.clone());
            }
            if version.served {
                resources.push(resource);
            }
        }
        let installed = Installed {
            digest,
            names,
            terminating,
            revision: since,
            seen: revision,
            resources,
            stored,
        };
        if let Some(stored) = &installed.stored {
            self.stale.push((stored.prefix.clone(), since));
        }
        let resources = installed.resources.clone();
        let before = self.installed.insert(name, installed);
        self.withdraw(before.as_ref());
        self.served.extend(resources);
        Ok(true)
    }

    fn withdraw(&mut self, installed: Option<&Installed>) {
        let Some(gone) = installed.filter(|installed| !installed.resources.is_empty()) else {
            return;
        };
        let is_gone = |resource: &Arc<Resource>| gone.resources.iter().any(|old| Arc::ptr_eq(old, resource));
        self.served.retain(|resource| !is_gone(resource));
    }

    fn remove(&mut self, name: &str) {
        let Some(installed) = self.installed.remove(name) else {
            return;
        };
        if let Some(stored) = &installed.stored {
            self.stale.push((stored.prefix.clone(), i64::MAX));
        }
        self.withdraw(Some(&installed));
        self.publish();
    }

    /// Tells the registry what is served now, in the order of discovery. Only then do the caches of what
    /// was served before end, and with them its watches: who comes back finds the new.
    fn publish(&mut self) {
        // Sorted but for a few, which this sort makes use of.
        self.served.sort_by(|a, b| {
            let (a, b) = (a.facts, b.facts);
            a.group
                .cmp(b.group)
                .then_with(|| names::version_order(b.version, a.version))
                .then_with(|| a.plural.cmp(b.plural))
        });
        let customs = Customs::new(self.served.clone());
        self.inner.registry.resources.set_customs(customs);
        for (prefix, revision) in self.stale.drain(..) {
            self.inner.registry.drop_older_cache(&prefix, revision);
        }
    }
}

/// Changes the status of a definition, if it is still the one with this uid.
pub(super) async fn write(
    inner: &Arc<Inner>,
    definitions: &Resource,
    name: &str,
    uid: &str,
    change: &mut (dyn FnMut(Value) -> Value + Send),
) -> Result<Value, Status> {
    let path = format!("/apis/{GROUP}/v1/{PLURAL}/{name}");
    let changed = |current: Value| {
        if object::uid(&current) == uid {
            Ok(Some(change(current)))
        } else {
            Err(Status::not_found(&definitions.group_resource, name))
        }
    };
    Loopback::new(inner).update(&path, "status", changed).await
}

/// Reads one definition as it is now.
pub(super) async fn read(inner: &Inner, definitions: &Resource, name: &str) -> Result<Option<Value>, Status> {
    inner.registry.get(definitions, "", name, ReadAt::Latest).await
}
