//! Whether what the runtime says of pods can be so. An answer that cannot is an error, as if there was none: acting on it
//! could end what runs, or start it twice. Pure.

use std::collections::HashSet;

use skiff_cri::{Status, v1};

use crate::observed::labels;

/// Containers, or sandboxes, of one pod.
const MAX_LISTED: usize = 4096;

fn wrong(what: impl Into<String>) -> Status {
    Status::internal(what)
}

fn known_sandbox_state(state: i32) -> bool {
    v1::PodSandboxState::try_from(state).is_ok()
}

fn known_container_state(state: i32) -> bool {
    v1::ContainerState::try_from(state).is_ok()
}

/// The ids of a list, each with its state.
fn check_list<'a>(
    what: &str,
    is_known: fn(i32) -> bool,
    list: impl Iterator<Item = (&'a str, i32)>,
) -> Result<usize, Status> {
    let mut seen = HashSet::new();
    for (id, state) in list {
        if id.is_empty() {
            return Err(wrong(format!("the container runtime lists a {what} without id")));
        }
        if !is_known(state) {
            return Err(wrong(format!(
                "the container runtime lists the {what} {id} with the unknown state {state}"
            )));
        }
        if !seen.insert(id) {
            return Err(wrong(format!(
                "the container runtime lists the {what} {id} twice"
            )));
        }
    }
    Ok(seen.len())
}

pub fn check_sandboxes(list: &[v1::PodSandbox]) -> Result<usize, Status> {
    let list = list.iter().map(|one| (one.id.as_str(), one.state));
    check_list("pod sandbox", known_sandbox_state, list)
}

pub fn check_containers(list: &[v1::Container]) -> Result<usize, Status> {
    let list = list.iter().map(|one| (one.id.as_str(), one.state));
    check_list("container", known_container_state, list)
}

/// One pod has no more than this.
pub fn check_count(count: usize) -> Result<(), Status> {
    if count > MAX_LISTED {
        return Err(wrong(format!(
            "the container runtime lists {count} entries for one pod; {MAX_LISTED} are read at most"
        )));
    }
    Ok(())
}

/// The answer about one sandbox of that pod.
pub fn check_sandbox(status: &v1::PodSandboxStatus, id: &str, uid: &str) -> Result<(), Status> {
    let metadata = status.metadata.as_ref();
    let metadata = metadata.ok_or_else(|| wrong("status.Metadata is not set"))?;
    if status.id.is_empty() {
        return Err(wrong("status.Id is not set"));
    }
    if metadata.name.is_empty() || metadata.namespace.is_empty() || metadata.uid.is_empty() {
        return Err(wrong(
            "metadata.Name, metadata.Namespace or metadata.Uid is not set",
        ));
    }
    if status.created_at == 0 {
        return Err(wrong("status.CreatedAt is not set"));
    }
    if status.id != id || metadata.uid != uid {
        return Err(wrong(format!(
            "asked for pod sandbox {id} of pod {uid}, the container runtime answers with {} of pod {}",
            status.id, metadata.uid
        )));
    }
    match known_sandbox_state(status.state) {
        true => Ok(()),
        false => Err(wrong(format!(
            "pod sandbox {id} has the unknown state {}",
            status.state
        ))),
    }
}

/// The answer about one container of that pod.
pub fn check_container(status: &v1::ContainerStatus, id: &str, uid: &str) -> Result<(), Status> {
    if status.id.is_empty() {
        return Err(wrong("status.Id is not set"));
    }
    if status
        .metadata
        .as_ref()
        .is_none_or(|metadata| metadata.name.is_empty())
    {
        return Err(wrong("metadata.Name is not in metadata"));
    }
    if status.created_at == 0 {
        return Err(wrong("status.CreatedAt is not set"));
    }
    let of = status.labels.get(labels::POD_UID).map_or("", String::as_str);
    if status.id != id || of != uid {
        return Err(wrong(format!(
            "asked for container {id} of pod {uid}, the container runtime answers with {} of pod {of:?}",
            status.id
        )));
    }
    match known_container_state(status.state) {
        true => Ok(()),
        false => Err(wrong(format!(
            "container {id} has the unknown state {}",
            status.state
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(change: impl FnOnce(&mut v1::ContainerStatus)) -> Result<(), String> {
        let mut status = v1::ContainerStatus {
            id: "c1".into(),
            metadata: Some(v1::ContainerMetadata {
                name: "c".into(),
                attempt: 0,
            }),
            created_at: 1,
            labels: [(labels::POD_UID.to_owned(), "u1".to_owned())].into(),
            ..Default::default()
        };
        change(&mut status);
        check_container(&status, "c1", "u1").map_err(|status| status.message().to_owned())
    }

    #[test]
    fn answers_about_containers() {
        let check = |result: Result<(), String>, expected: &str| {
            assert_eq!(result.unwrap_err(), expected);
        };
        assert_eq!(container(|_| {}), Ok(()));
        check(container(|c| c.id.clear()), "status.Id is not set");
        check(
            container(|c| c.metadata = None),
            "metadata.Name is not in metadata",
        );
        check(container(|c| c.created_at = 0), "status.CreatedAt is not set");
        check(
            container(|c| c.state = 42),
            "container c1 has the unknown state 42",
        );
        check(
            container(|c| {
                c.labels.insert(labels::POD_UID.to_owned(), "u2".to_owned());
            }),
            "asked for container c1 of pod u1, the container runtime answers with c1 of pod \"u2\"",
        );
        assert!(container(|c| c.id = "c2".into()).is_err());
    }

    #[test]
    fn answers_about_sandboxes() {
        let sandbox = |change: fn(&mut v1::PodSandboxStatus)| {
            let mut status = v1::PodSandboxStatus {
                id: "s1".into(),
                metadata: Some(v1::PodSandboxMetadata {
                    name: "p".into(),
                    namespace: "ns".into(),
                    uid: "u1".into(),
                    attempt: 0,
                }),
                created_at: 1,
                ..Default::default()
            };
            change(&mut status);
            check_sandbox(&status, "s1", "u1").is_ok()
        };
        assert!(sandbox(|_| {}));
        assert!(!sandbox(|s| s.id.clear()));
        assert!(!sandbox(|s| s.id = "s2".into()));
        assert!(!sandbox(|s| s.metadata = None));
        assert!(!sandbox(|s| s.metadata.as_mut().unwrap().uid = "u2".into()));
        assert!(!sandbox(|s| s.created_at = 0));
        assert!(!sandbox(|s| s.state = 7));
    }

    #[test]
    fn lists() {
        let one = |id: &str, state| v1::Container {
            id: id.into(),
            state,
            ..Default::default()
        };
        assert_eq!(check_containers(&[one("a", 0), one("b", 3)]).unwrap(), 2);
        assert!(check_containers(&[one("a", 0), one("a", 0)]).is_err());
        assert!(check_containers(&[one("", 0)]).is_err());
        assert!(check_containers(&[one("a", 4)]).is_err());
        assert!(check_count(MAX_LISTED).is_ok() && check_count(MAX_LISTED + 1).is_err());
    }
}
