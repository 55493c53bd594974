//! Kinds that come with a CustomResourceDefinition, watched while it is there: users install, change and remove
//! definitions as they like. A kind without its definition costs no watch.

use std::borrow::Cow;
use std::sync::Arc;

use futures::FutureExt;
use k8s_openapi::ClusterResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Client, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::{Informer, InformerFactory};

/// Called at every change of a kind, and when all of its objects are known.
pub type Noted = Arc<dyn Fn() + Send + Sync>;

/// The part of a CustomResourceDefinition that says what is served.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Definition {
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: DefinitionSpec,
    #[serde(default)]
    pub status: Option<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct DefinitionSpec {
    #[serde(default)]
    pub group: String,
    #[serde(default)]
    pub versions: Vec<DefinitionVersion>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct DefinitionVersion {
    pub name: String,
    #[serde(default)]
    pub served: bool,
}

impl Resource for Definition {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        "CustomResourceDefinition".into()
    }
    fn group(_: &()) -> Cow<'_, str> {
        "apiextensions.k8s.io".into()
    }
    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }
    fn plural(_: &()) -> Cow<'_, str> {
        "customresourcedefinitions".into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Definition {
    /// The name of a kind's definition.
    pub fn name_of<K: Resource<DynamicType = ()>>() -> String {
        format!("{}.{}", K::plural(&()), K::group(&()))
    }

    /// Whether `K` can be listed, in the version that `K` is.
    pub fn serves<K: Resource<DynamicType = ()>>(&self) -> bool {
        let version = K::version(&());
        let conditions = self.status.as_ref().map(|status| &status["conditions"]);
        let mut conditions = conditions.and_then(Value::as_array).into_iter().flatten();
        self.metadata.name.as_deref() == Some(Self::name_of::<K>().as_str())
            && self.metadata.deletion_timestamp.is_none()
            && self
                .spec
                .versions
                .iter()
                .any(|each| each.served && each.name == version)
            && conditions.any(|each| each["type"] == "Established" && each["status"] == "True")
    }
}

/// A kind, watched while it is defined.
pub struct DefinedKind<K>(Option<(CancellationToken, Informer<K>)>);

impl<K> Default for DefinedKind<K> {
    fn default() -> Self {
        DefinedKind(None)
    }
}

impl<K> DefinedKind<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Send + Sync + 'static,
{
    /// Begins or ends to watch, by what the definitions say. Returns whether that changed.
    pub fn follow(
        &mut self,
        definitions: &[Arc<Definition>],
        client: &Client,
        stop: &CancellationToken,
        noted: &Noted,
    ) -> bool {
        let is_served = definitions.iter().any(|each| each.serves::<K>());
        match (&self.0, is_served) {
            (None, true) => {
                let stop = stop.child_token();
                let informer: Informer<K> = InformerFactory::new(client.clone(), stop.clone()).informer();
                let news = noted.clone();
                informer.subscribe(move |_| news());
                let (waiting, news, ended) = (informer.clone(), noted.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = waiting.synced() => news(),
                        () = ended.cancelled() => {}
                    }
                });
                self.0 = Some((stop, informer));
                true
            }
            (Some((stop, _)), false) => {
                stop.cancel();
                self.0 = None;
                true
            }
            _ => false,
        }
    }

    /// All objects, none without the definition; `None` until all are known.
    pub fn list(&self) -> Option<Vec<Arc<K>>> {
        match &self.0 {
            None => Some(Vec::new()),
            Some((_, informer)) => informer.synced().now_or_never().map(|()| informer.list()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn definition(change: impl FnOnce(&mut Value)) -> Definition {
        let mut object = json!({
            "metadata": {"name": "customresourcedefinitions.apiextensions.k8s.io"},
            "spec": {"versions": [{"name": "v1beta1", "served": true}, {"name": "v1", "served": true}]},
            "status": {"conditions": [{"type": "NamesAccepted", "status": "True"}, {"type": "Established", "status": "True"}]},
        });
        change(&mut object);
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn what_is_served_is_established_in_its_version_and_stays() {
        let serves = |change: fn(&mut Value)| definition(change).serves::<Definition>();
        assert!(serves(|_| {}));
        assert!(!serves(
            |object| object["metadata"]["name"] = json!("others.apiextensions.k8s.io")
        ));
        assert!(!serves(
            |object| object["spec"]["versions"][1]["served"] = json!(false)
        ));
        assert!(!serves(
            |object| object["status"]["conditions"][1]["status"] = json!("False")
        ));
        assert!(!serves(|object| object["status"] = Value::Null));
        assert!(!serves(|object| {
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }));
    }
}
