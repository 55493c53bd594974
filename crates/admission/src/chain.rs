//! The chain: runs every plugin in the order of the list, mutation first, validation after the object
//! has been checked. One refusal ends the request.

use async_trait::async_trait;
use serde_json::Value;
use skiff_api::node::at;
use skiff_meta::Status;

use crate::{Attributes, Operation};

/// How a plugin reads other objects: the registry answers from the watch cache.
#[async_trait]
pub trait Lister: Send + Sync {
    /// The object, or `None` if the cache does not have it. `namespace` is empty for cluster-scoped kinds.
    async fn get(
        &self,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, Status>;

    /// The same past the cache, for decisions that a cache a moment behind would get wrong.
    async fn get_latest(
        &self,
        group: &str,
        resource: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Value>, Status> {
        self.get(group, resource, namespace, name).await
    }

    /// The labels of an object whose keys begin with `prefix`; `None` if there is no such object. Asked on every write
    /// of a pod, so a cache should answer without decoding the object.
    async fn labels(
        &self,
        group: &str,
        resource: &str,
        name: &str,
        prefix: &str,
    ) -> Result<Option<Vec<(String, String)>>, Status> {
        let found = self.get(group, resource, "", name).await?;
        Ok(found.map(|object| {
            let labels = at(&object, "metadata.labels").as_object();
            let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
            let all = labels
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.clone(), text(value)));
            all.filter(|(key, _)| key.starts_with(prefix)).collect()
        }))
    }

    /// All objects of a resource; an empty `namespace` means all.
    async fn list(&self, group: &str, resource: &str, namespace: &str) -> Result<Vec<Value>, Status>;

    /// Writes an object's status if the object is still the one that was read; a 409 says that it is not. The one
    /// write that admission makes: a quota is charged before what it is charged for exists.
    async fn write_status(&self, group: &str, resource: &str, object: Value) -> Result<(), Status> {
        let _ = object;
        Err(Status::not_built(format_args!(
            "writing the status of {resource} of \"{group}\" in admission"
        )))
    }
}

#[async_trait]
pub trait Plugin: Send + Sync {
    /// Upstream's name of the plugin, as in `--enable-admission-plugins`.
    fn name(&self) -> &'static str;

    fn handles(&self, operation: Operation) -> bool;

    /// Whether the plugin has anything to say about a request: cheaper than to be called and find nothing.
    fn concerns(&self, _: &Attributes<'_>) -> bool {
        true
    }

    /// May change the object.
    async fn admit(&self, _: &mut Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        Ok(())
    }

    /// May only refuse.
    async fn validate(&self, _: &Attributes<'_>, _: &dyn Lister) -> Result<(), Status> {
        Ok(())
    }
}

/// The plugins in the order in which they run.
pub struct Chain {
    plugins: Vec<Box<dyn Plugin>>,
    /// These are not put in later, either.
    pub(crate) disabled: Vec<String>,
}

impl Chain {
    pub fn new(plugins: Vec<Box<dyn Plugin>>) -> Self {
        Chain {
            plugins,
            disabled: Vec::new(),
        }
    }

    /// Upstream's default set, in upstream's order.
    pub fn recommended() -> Self {
        Chain::new(crate::plugins::recommended())
    }

    /// Puts a plugin in front of another, or at the end.
    pub fn insert_before(&mut self, name: &str, plugin: Box<dyn Plugin>) {
        if self.disabled.iter().any(|disabled| disabled == plugin.name()) {
            return;
        }
        let at = self.plugins.iter().position(|present| present.name() == name);
        self.plugins.insert(at.unwrap_or(self.plugins.len()), plugin);
    }

    /// Runs the plugins, and once more if one asked for it: what a webhook added is then defaulted and looked at by
    /// those before it.
    pub async fn admit(&self, attributes: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        self.admit_once(attributes, lister).await?;
        if attributes.reinvocation.wanted {
            attributes.reinvocation.again = true;
            self.admit_once(attributes, lister).await?;
        }
        Ok(())
    }

    async fn admit_once(&self, attributes: &mut Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        for plugin in &self.plugins {
            if plugin.handles(attributes.operation) && plugin.concerns(attributes) {
                plugin.admit(attributes, lister).await?;
            }
        }
        Ok(())
    }

    pub async fn validate(&self, attributes: &Attributes<'_>, lister: &dyn Lister) -> Result<(), Status> {
        for plugin in &self.plugins {
            if plugin.handles(attributes.operation) && plugin.concerns(attributes) {
                plugin.validate(attributes, lister).await?;
            }
        }
        Ok(())
    }

    pub fn names(&self) -> Vec<&'static str> {
        self.plugins.iter().map(|p| p.name()).collect()
    }
}
