//! The admission chain as the registry's writes pass it, with the attributes of one request.

use async_trait::async_trait;
use serde_json::Value;
use skiff_admission::{Attributes, Lister, Operation, User};
use skiff_auth::UserInfo;
use skiff_meta::Status;
use skiff_registry::{Context, Gate, Open, Part, Registry, Resource, encode, object};
use skiff_registry::{ListOptions, ReadAt};

use crate::chain::Exchange;
use crate::hooks::escalation;
use crate::server::Inner;

/// One request at the admission chain.
pub struct Admission<'a> {
    inner: &'a Inner,
    user: User,
    identity: &'a UserInfo,
    resource: &'a Resource,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
    dry_run: bool,
    options: Option<&'a Value>,
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
            },
            resource,
            subresource: &exchange.info.subresource,
            namespace: &exchange.info.namespace,
            name: &exchange.info.name,
            dry_run: exchange.context.dry_run,
            options,
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
        Attributes {
            user: &self.user,
            operation,
            group: self.resource.facts.group,
            version: self.resource.facts.version,
            resource: self.resource.facts.plural,
            subresource: self.subresource,
            kind: self.resource.facts.kind,
            namespace: self.namespace,
            name,
            object,
            old_object: old,
            dry_run: self.dry_run,
            options: self.options,
        }
    }

    fn name_of(&self, object: Option<&Value>, old: Option<&Value>) -> String {
        if !self.name.is_empty() {
            return self.name.to_string();
        }
        object.or(old).map(object::name).unwrap_or("").to_string()
    }

    /// Passes a connect (exec, proxy, ...) through the chain.
    pub async fn connect(&self) -> Result<(), Status> {
        let mut attributes = self.attributes(None, None, self.name);
        attributes.operation = Operation::Connect;
        let lister = CacheLister(&self.inner.registry);
        self.inner.chain.admit(&mut attributes, &lister).await?;
        self.inner.chain.validate(&attributes, &lister).await
    }
}

#[async_trait]
impl Gate for Admission<'_> {
    async fn admit(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        let name = self.name_of(object.as_deref(), old);
        let mut attributes = self.attributes(object, old, &name);
        self.inner
            .chain
            .admit(&mut attributes, &CacheLister(&self.inner.registry))
            .await
    }

    async fn validate(&self, object: Option<&mut Value>, old: Option<&Value>) -> Result<(), Status> {
        let name = self.name_of(object.as_deref(), old);
        if let Some(new) = object.as_deref() {
            escalation::check(self.inner, self.identity, self.resource, self.namespace, new, old).await?;
        }
        let attributes = self.attributes(object, old, &name);
        self.inner
            .chain
            .validate(&attributes, &CacheLister(&self.inner.registry))
            .await
    }
}

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
                &context,
                resource,
                &namespace,
                &name,
                Part::Status,
                false,
                &mut transform,
                &Open,
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
        listed
            .items
            .iter()
            .map(|entry| encode::decode(&entry.bytes))
            .collect()
    }
}
