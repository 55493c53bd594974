//! What the server serves: every resource once, at its group's preferred version where it has one.

use kube::Client;
use kube::core::{ApiResource, GroupVersionKind};

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Served {
    pub resource: ApiResource,
    pub namespaced: bool,
    pub verbs: Vec<String>,
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
                        discovery
                            .unparsed
                            .push(format!("unexpected GroupVersion string: {told}"));
                    }
                    Ok(list) => discovery.add(&group.name, &version.version, list.resources),
                    Err(error) => {
                        discovery
                            .failures
                            .push((version.group_version, crate::error_message(&error)));
                    }
                }
            }
        }
        Ok(discovery)
    }

    fn add(
        &mut self,
        group: &str,
        version: &str,
        resources: Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResource>,
    ) {
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
