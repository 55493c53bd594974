//! The admission chain as the registry's writes pass it, with the attributes of one request.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use skiff_admission::{Access, AdmissionRecorder, Attributes, Lister, Operation, Reinvocation, User};
use skiff_auth::UserInfo;
use skiff_meta::{GroupVersion, Status, names};
use skiff_registry::{Context, Gate, Open, Registry, Resource, Write, WriteScope, encode, object};
use skiff_registry::{ListOptions, ReadAt};

use crate::audit::Level;
use crate::chain::Exchange;
use crate::hooks::{claim_access, escalation, param_access, signer_access};
use crate::query::Query;
use crate::server::Inner;

/// One request at the admission chain.
pub struct Admission<'a> {
    inner: &'a Inner,
    user: User,
    identity: &'a UserInfo,
    resource: &'a Resource,
    verb: &'a str,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
    dry_run: bool,
    options: Option<&'a Value>,
    recorder: ContextRecorder<'a>,
}

/// Warnings of plugins go the way of all others.
struct ContextRecorder<'a>(&'a Context, Level);

impl AdmissionRecorder for ContextRecorder<'_> {
    fn warn(&self, text: String) {
        self.0.warn(text);
    }

    fn webhook_took(&self, took: Duration) {
        self.0.add_webhook_time(took);
    }

    fn audited(&self) -> bool {
        self.0.audited()
    }

    fn audits_objects(&self) -> bool {
        self.1 >= Level::Request
    }

    /// A key is a domain, a slash and a name; what else a webhook may call it is dropped.
    fn annotate(&self, key: &str, value: String) {
        if key.contains('/') && names::qualified_name(key).is_empty() {
            self.0.annotate(key, value);
        }
    }
}

impl Access for Admission<'_> {
    fn may(&self, verb: &str, group: &str, resource: &str, namespace: &str, name: &str) -> bool {
        let wanted = skiff_auth::Attributes {
            verb,
            is_resource: true,
            group,
            version: "*",
            resource,
            namespace,
            name,
            ..skiff_auth::Attributes::default()
        };
        self.inner.authorizer.authorize(self.identity, &wanted).allowed
    }
}

impl<'a> Admission<'a> {
    pub fn new(
        inner: &'a Inner,
        exchange: &'a Exchange,
        resource: &'a Resource,
        options: Option<&'a Value>,
    ) -> Admission<'a> {
        let user = &exchange.user;
        Admission {
            inner,
            identity: user,
            user: User {
                name: user.name.clone(),
                uid: user.uid.clone(),
                groups: user.groups.clone(),
                extra: user.extra.clone(),
            },
            resource,
            verb: &exchange.info.verb,
            subresource: &exchange.info.subresource,
            namespace: &exchange.info.namespace,
            name: &exchange.info.name,
            dry_run: exchange.context.dry_run,
            options,
            recorder: ContextRecorder(
                &exchange.context,
                exchange.trail.as_ref().map_or(Level::None, |trail| trail.level()),
            ),
        }
    }

    fn attributes<'b>(
        &'b self,
        object: Option<&'b mut Value>,
        old: Option<&'b Value>,
        name: &'b str,
    ) -> Attributes<'b> {
        let operation = match (&object, old) {
            (None, _) => Operation::Delete,
            (Some(_), Some(_)) => Operation::Update,
            (Some(_), None) => Operation::Create,
        };
        let facts = self.resource.facts;
        let (kind_group, kind_version, kind) = match facts.subresource(self.subresource) {
            Some(subresource) => (subresource.group, subresource.version, subresource.kind),
            None => (facts.group, facts.version, facts.kind),
        };
        Attributes {
            user: &self.user,
            operation,
            group: self.resource.facts.group,
            version: self.resource.facts.version,
            resource: self.resource.facts.plural,
            subresource: self.subresource,
            kind,
            kind_group,
            kind_version,
            namespace: self.namespace,
            name,
            object,
            old_object: old,
            dry_run: self.dry_run,
            options: self.options,
            recorder: &self.recorder,
            access: self,
            reinvocation: Reinvocation::default(),
        }
    }

    fn name_of(&self, object: Option<&Value>) -> String {
        if !self.name.is_empty() {
            return self.name.to_string();
        }
        // The objects of a collection go unnamed.
        object.map(object::name).unwrap_or("").to_string()
    }

    /// Passes a connect (exec, proxy, ...) with its options through the chain.
    pub async fn connect(&self, query: &Query) -> Result<(), Status> {
        let mut options = self.connect_options(query);
        let mut attributes = self.attributes(Some(&mut options), None, self.name);
        attributes.operation = Operation::Connect;
        let lister = CacheLister(&self.inner.registry);
        self.inner.chain.admit(&mut attributes, &lister).await?;
        self.inner.chain.validate(&attributes, &lister).await
    }

    /// The query of a connect as the object that it stands for: `PodExecOptions` and its like.
    fn connect_options(&self, query: &Query) -> Value {
        let facts = self.resource.facts.subresource(self.subresource);
        let (group, version, kind) = facts.map_or(("", "v1", ""), |s| (s.group, s.version, s.kind));
        let mut value = json!({"kind": kind, "apiVersion": GroupVersion::new(group, version).to_string()});
        for flag in ["stdin", "stdout", "stderr", "tty"] {
            if query.flag(flag) == Some(true) {
                value[flag] = json!(true);
            }
        }
        for (name, text) in [
            ("container", query.text("container")),
            ("path", query.text("path")),
        ] {
            if !text.is_empty() {
                value[name] = json!(text);
            }
        }
        let command: Vec<&str> = query.all("command").collect();
        if !command.is_empty() {
            value["command"] = json!(command);
        }
        let ports: Vec<i64> = query.all("ports").filter_map(|port| port.parse().ok()).collect();
        if !ports.is_empty() {
            value["ports"] = json!(ports);
        }
        value
    }

    /// Passes the create of something that is acted upon, not stored (a binding, an eviction), through the chain.
    pub async fn action(&self, object: &mut Value) -> Result<(), Status> {
        if !self.namespace.is_empty() && object::namespace(object).is_empty() {
            object::set(object, "namespace", self.namespace);
        }
        self.admit(Some(object), None).await?;
        self.validate(Some(object), None).await
    }
}

#[async_trait]
impl Gate for Admission<'_> {
    async fn admit(&self, mut object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        let name = self.name_of(object.as_deref());
        let mut attributes = self.attributes(object.as_deref_mut(), old, &name);
        self.inner
            .chain
            .admit(&mut attributes, &CacheLister(&self.inner.registry))
            .await?;
        drop(attributes);
        // Before the object is validated, as upstream's storage does it.
        match object.as_deref() {
            Some(new) => {
                escalation::check(self.inner, self.identity, self.resource, self.namespace, new, old).await?;
                if self.subresource == "status" {
                    claim_access::check(self.inner, self.identity, self.resource, self.verb, new, old)
                        .await?;
                }
                param_access::check(self.inner, self.identity, self.resource, new, old).await
            }
            None => Ok(()),
        }
    }

    async fn validate(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        // After the object is validated, as upstream does it.
        if self.subresource == "status"
            && let (Some(new), Some(old)) = (object.as_deref(), old)
        {
            signer_access::check(self.inner, self.identity, self.resource, new, old).await?;
        }
        let name = self.name_of(object.as_deref());
        let attributes = self.attributes(object, old, &name);
        self.inner
            .chain
            .validate(&attributes, &CacheLister(&self.inner.registry))
            .await
    }
}

/// So many objects are decoded for a plugin before other requests get a turn.
const DECODED_A_TURN: usize = 256;

/// Other objects as admission plugins read them: from the cache.
pub struct CacheLister<'a>(pub &'a Registry);

impl CacheLister<'_> {
    async fn read(
        &self,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
        at: ReadAt,
    ) -> Result<Option<Value>, Status> {
        match self.0.resources.find_any(group, resource) {
            Some(resource) => self.0.get(&resource, namespace, name, at).await,
            None => Ok(None),
        }
    }
}

#[async_trait]
impl Lister for CacheLister<'_> {
    async fn get(
        &self,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, Status> {
        self.read(group, resource, namespace, name, ReadAt::Any).await
    }

    async fn get_latest(
        &self,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, Status> {
        self.read(group, resource, namespace, name, ReadAt::Latest).await
    }

    async fn labels(
        &self,
        group: &str,
        resource: &str,
        name: &str,
        prefix: &str,
    ) -> Result<Option<Vec<(String, String)>>, Status> {
        let Some(resource) = self.0.resources.find_any(group, resource) else {
            return Ok(None);
        };
        let mut entry = self.0.get_entry(&resource, "", name, ReadAt::Any).await?;
        if entry.is_none() {
            entry = self.0.get_entry(&resource, "", name, ReadAt::Latest).await?;
        }
        Ok(entry.map(|entry| {
            let labels = entry.head.labels.iter();
            let wanted = labels.filter(|(key, _)| key.starts_with(prefix));
            wanted
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect()
        }))
    }

    async fn write_status(&self, group: &str, resource: &str, object: Value) -> Result<(), Status> {
        let Some(resource) = self.0.resources.preferred(group, resource) else {
            return Ok(());
        };
        let (namespace, name) = (
            object::namespace(&object).to_string(),
            object::name(&object).to_string(),
        );
        let mut transform = |_: Option<&Value>| Ok(object.clone());
        let context = Context::default();
        self.0
            .update(
                &Write {
                    context: &context,
                    resource,
                    namespace: &namespace,
                    gate: &Open,
                },
                &name,
                WriteScope::Status,
                false,
                &mut transform,
            )
            .await?;
        Ok(())
    }

    async fn list(&self, group: &str, resource: &str, namespace: &str) -> Result<Vec<Value>, Status> {
        let Some(resource) = self.0.resources.find_any(group, resource) else {
            return Ok(Vec::new());
        };
        let options = ListOptions {
            namespace: (!namespace.is_empty()).then(|| namespace.to_string()),
            at: ReadAt::Any,
            ..ListOptions::default()
        };
        let listed = self.0.list(&resource, options).await?;
        let mut all = Vec::with_capacity(listed.items.len());
        for some in listed.items.chunks(DECODED_A_TURN) {
            for entry in some {
                all.push(encode::decode(&entry.bytes)?);
            }
            if some.len() == DECODED_A_TURN {
                tokio::task::yield_now().await;
            }
        }
        Ok(all)
    }
}
