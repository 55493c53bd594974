//! What the runtime has of pods: all in outline, or one in full. What cannot be so is an error, see `runtime_answers.rs`.

use std::collections::{HashMap, HashSet};

use skiff_cri::v1;
use skiff_cri::{Code, Status};

use super::{Result, Runtime};
use crate::observed::{self, ObservedPod, labels};
use crate::runtime_answers::{
    check_container, check_containers, check_count, check_sandbox, check_sandboxes,
};
use crate::termination;

/// One pod's part of a listing: enough to notice a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodOutline {
    pub namespace: String,
    pub name: String,
    pub sandboxes: Vec<(String, i32)>,
    pub containers: Vec<(String, i32)>,
}

fn by_pod(uid: &str) -> HashMap<String, String> {
    HashMap::from([(labels::POD_UID.to_owned(), uid.to_owned())])
}

impl Runtime {
    /// Every pod the runtime knows, by uid.
    pub async fn outlines(&self) -> Result<HashMap<String, PodOutline>> {
        let sandboxes = async {
            self.within(
                "list_podsandbox",
                self.timeout,
                self.runtime
                    .clone()
                    .list_pod_sandbox(v1::ListPodSandboxRequest { filter: None }),
            )
            .await
        };
        let containers = async {
            self.within(
                "list_containers",
                self.timeout,
                self.runtime
                    .clone()
                    .list_containers(v1::ListContainersRequest { filter: None }),
            )
            .await
        };
        let (sandboxes, containers) = tokio::try_join!(sandboxes, containers)?;
        check_sandboxes(&sandboxes.items)?;
        check_containers(&containers.containers)?;
        let mut pods: HashMap<String, PodOutline> = HashMap::new();
        for sandbox in sandboxes.items {
            // Without a pod it is nobody's.
            let Some(metadata) = sandbox.metadata.filter(|metadata| !metadata.uid.is_empty()) else {
                continue;
            };
            let pod = pods.entry(metadata.uid).or_default();
            pod.namespace = metadata.namespace;
            pod.name = metadata.name;
            pod.sandboxes.push((sandbox.id, sandbox.state));
        }
        for container in containers.containers {
            let uid = container.labels.get(labels::POD_UID);
            if let Some(uid) = uid.filter(|uid| !uid.is_empty()) {
                pods.entry(uid.clone())
                    .or_default()
                    .containers
                    .push((container.id, container.state));
            }
        }
        for pod in pods.values_mut() {
            pod.sandboxes.sort();
            pod.containers.sort();
        }
        Ok(pods)
    }

    /// Everything the runtime has of one pod, in full.
    pub async fn observe(&self, uid: &str) -> Result<ObservedPod> {
        let sandbox_filter = v1::PodSandboxFilter {
            label_selector: by_pod(uid),
            ..Default::default()
        };
        let container_filter = v1::ContainerFilter {
            label_selector: by_pod(uid),
            ..Default::default()
        };
        let sandboxes = async {
            let request = v1::ListPodSandboxRequest {
                filter: Some(sandbox_filter),
            };
            let list = self
                .within(
                    "list_podsandbox",
                    self.timeout,
                    self.runtime.clone().list_pod_sandbox(request),
                )
                .await?;
            check_count(check_sandboxes(&list.items)?)?;
            let statuses = { list.items.into_iter() }.map(|item| self.sandbox_status(item.id, uid));
            futures::future::join_all(statuses)
                .await
                .into_iter()
                .collect::<Result<Vec<_>>>()
        };
        let containers = async {
            let request = v1::ListContainersRequest {
                filter: Some(container_filter),
            };
            let list = self
                .within(
                    "list_containers",
                    self.timeout,
                    self.runtime.clone().list_containers(request),
                )
                .await?;
            check_count(check_containers(&list.containers)?)?;
            let statuses = list.containers.into_iter().map(async |item| {
                let status = self.container_status(item.id, uid).await?;
                Ok(status.map(|status| (status, item.pod_sandbox_id)))
            });
            futures::future::join_all(statuses)
                .await
                .into_iter()
                .collect::<Result<Vec<_>>>()
        };
        let (sandboxes, containers) = tokio::try_join!(sandboxes, containers)?;
        let mut pod = ObservedPod {
            sandboxes: sandboxes
                .into_iter()
                .flatten()
                .map(observed::sandbox_from_cri)
                .collect(),
            containers: containers
                .into_iter()
                .flatten()
                .map(|(status, sandbox_id)| observed::ObservedContainer {
                    sandbox_id,
                    ..observed::container_from_cri(status, termination::message)
                })
                .collect(),
        };
        pod.sort();
        Ok(pod)
    }

    /// Fails if the runtime still has what it no longer lists of what ran: then it would be started twice.
    pub async fn check_gone(&self, uid: &str, before: &ObservedPod, now: &ObservedPod) -> Result<()> {
        let gone = before.running().map(|one| &one.id);
        for id in gone.filter(|id| now.containers.iter().all(|one| one.id != **id)) {
            if self.container_status(id.clone(), uid).await?.is_some() {
                let why = format!("the container runtime does not list container {id}, which it has");
                return Err(Status::internal(why));
            }
        }
        let gone = before.sandboxes.iter().filter(|one| one.ready).map(|one| &one.id);
        for id in gone.filter(|id| now.sandboxes.iter().all(|one| one.id != **id)) {
            if self.sandbox_status(id.clone(), uid).await?.is_some() {
                let why = format!("the container runtime does not list pod sandbox {id}, which it has");
                return Err(Status::internal(why));
            }
        }
        Ok(())
    }

    /// `None` if it was removed since it was listed.
    pub async fn sandbox_status(&self, id: String, uid: &str) -> Result<Option<v1::PodSandboxStatus>> {
        let request = v1::PodSandboxStatusRequest {
            pod_sandbox_id: id.clone(),
            verbose: false,
        };
        match self
            .within(
                "podsandbox_status",
                self.timeout,
                self.runtime.clone().pod_sandbox_status(request),
            )
            .await
        {
            Ok(response) => {
                let status = response.status;
                let status = status.ok_or_else(|| Status::internal("pod sandbox status is not set"))?;
                check_sandbox(&status, &id, uid)?;
                Ok(Some(status))
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }

    pub async fn container_status(&self, id: String, uid: &str) -> Result<Option<v1::ContainerStatus>> {
        let request = v1::ContainerStatusRequest {
            container_id: id.clone(),
            verbose: false,
        };
        match self
            .within(
                "container_status",
                self.timeout,
                self.runtime.clone().container_status(request),
            )
            .await
        {
            Ok(response) => {
                let status = response.status;
                let status = status.ok_or_else(|| Status::internal("container status is not set"))?;
                check_container(&status, &id, uid)?;
                Ok(Some(status))
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    }
}

/// Pods whose part of the listing differs.
pub fn changed(before: &HashMap<String, PodOutline>, after: &HashMap<String, PodOutline>) -> HashSet<String> {
    let differs = |uid: &&String| before.get(*uid) != after.get(*uid);
    before
        .keys()
        .chain(after.keys())
        .filter(differs)
        .cloned()
        .collect()
}
