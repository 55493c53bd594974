//! What the server serves: every resource once, at its group's preferred version where it has one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{APIGroup, APIResource};
use kube::Client;
use kube::core::{ApiResource, GroupVersionKind};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Served {
    pub resource: ApiResource,
    pub namespaced: bool,
    pub verbs: Vec<String>,
    /// Changes with the version in which objects are stored.
    pub storage_version_hash: Option<String>,
}

impl Served {
    pub(crate) fn can(&self, verb: &str) -> bool {
        self.verbs.iter().any(|one| one == verb)
    }

    /// `deployments.apps`; the core group leaves a trailing nothing.
    pub(crate) fn group_resource(&self) -> String {
        if self.resource.group.is_empty() {
            self.resource.plural.clone()
        } else {
            format!("{}.{}", self.resource.plural, self.resource.group)
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Discovery {
    pub served: Vec<Served>,
    /// Groups and versions that could not be asked, with the reason.
    pub failures: Vec<(String, String)>,
    /// Why lists of resources were passed over: a server calls their group and version what is none.
    pub unparsed: Vec<String>,
}

impl Discovery {
    /// Fails only if the server cannot say which groups there are.
    pub(crate) async fn read(client: &Client) -> Result<Self, kube::Error> {
        let mut discovery = Discovery::default();
        let core = client.list_core_api_versions().await?;
        for version in core.versions {
            match client.list_core_api_resources(&version).await {
                Ok(list) => discovery.add("", &version, list.resources),
                Err(error) => discovery.failures.push((version, crate::error_message(&error))),
            }
        }
        for group in client.list_api_groups().await?.groups {
            discovery.add_group(client, group).await;
        }
        Ok(discovery)
    }

    async fn add_group(&mut self, client: &Client, group: APIGroup) {
        let preferred = group
            .preferred_version
            .as_ref()
            .map(|version| version.group_version.clone());
        let mut versions = group.versions;
        versions.sort_by_key(|version| Some(&version.group_version) != preferred.as_ref());
        for version in versions {
            match client.list_api_group_resources(&version.group_version).await {
                // COMPAT: upstream believes what the list says of itself.
                Ok(list) if list.group_version.matches('/').count() > 1 => {
                    let told = &list.group_version;
                    self.unparsed
                        .push(format!("unexpected GroupVersion string: {told}"));
                }
                Ok(list) => self.add(&group.name, &version.version, list.resources),
                Err(error) => self
                    .failures
                    .push((version.group_version, crate::error_message(&error))),
            }
        }
    }

    fn add(&mut self, group: &str, version: &str, resources: Vec<APIResource>) {
        for resource in resources {
            let known = self
                .served
                .iter()
                .any(|served| served.resource.group == group && served.resource.plural == resource.name);
            if resource.name.contains('/') || known {
                continue;
            }
            let kind = GroupVersionKind::gvk(group, version, &resource.kind);
            self.served.push(Served {
                resource: ApiResource::from_gvk_with_plural(&kind, &resource.name),
                namespaced: resource.namespaced,
                verbs: resource.verbs,
                storage_version_hash: resource.storage_version_hash,
            });
        }
    }

    /// The resource of an owner reference. Any version of the kind will do.
    pub(crate) fn find(&self, api_version: &str, kind: &str) -> Option<&Served> {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        self.served
            .iter()
            .find(|served| served.resource.group == group && served.resource.kind == kind)
    }
}

/// One resource, at its group's preferred version where it has one. `None`: it is not served.
pub(crate) async fn find_resource(
    client: &Client,
    group: &str,
    plural: &str,
) -> Result<Option<Served>, crate::Error> {
    let mut discovery = Discovery::default();
    if group.is_empty() {
        let list = client.list_core_api_resources("v1").await?;
        discovery.add("", "v1", list.resources);
    } else if let Some(group) = client
        .list_api_groups()
        .await?
        .groups
        .into_iter()
        .find(|g| g.name == group)
    {
        discovery.add_group(client, group).await;
    }
    let found = discovery
        .served
        .into_iter()
        .find(|served| served.resource.plural == plural);
    match (found, discovery.failures.into_iter().next()) {
        // A version that cannot be asked may have it.
        (None, Some((version, why))) => Err(crate::Error::Other(format!("{version}: {why}"))),
        (found, _) => Ok(found),
    }
}
