//! What the node's server shows of the machine itself: the pods that the runtime runs, whatever the API says, and the
//! files below /var/log.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use bytes::Bytes;
use futures::TryStreamExt;
use http::{HeaderValue, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat, openat2};
use serde_json::json;
use skiff_cri::v1;
use skiff_streaming::Body;
use tokio::io::AsyncReadExt;

use super::{json, text};
use crate::images::describe;
use crate::kubelet::Kubelet;
use crate::observed::ContainerState;

/// Where a machine keeps its logs.
const LOGS: &str = "/var/log";

/// The pods with something running, as the runtime tells of them.
pub async fn running_pods(kubelet: &Kubelet) -> Response<Body> {
    match list_running(kubelet).await {
        Ok(items) => json(&json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})),
        Err(status) => text(StatusCode::INTERNAL_SERVER_ERROR, describe(&status)),
    }
}

async fn list_running(kubelet: &Kubelet) -> Result<Vec<serde_json::Value>, skiff_cri::Status> {
    let mut outlines: Vec<_> = kubelet.runtime.outlines().await?.into_iter().collect();
    outlines.sort_by(|(_, a), (_, b)| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    let mut items = Vec::new();
    for (uid, outline) in outlines {
        let ready = v1::PodSandboxState::SandboxReady as i32;
        let running = v1::ContainerState::ContainerRunning as i32;
        if !outline.sandboxes.iter().any(|(_, state)| *state == ready)
            && !outline.containers.iter().any(|(_, state)| *state == running)
        {
            continue;
        }
        let observed = kubelet.runtime.observe(&uid).await?;
        let containers: Vec<_> = observed
            .containers
            .iter()
            .filter(|container| container.state == ContainerState::Running)
            .map(|container| json!({"name": container.name, "image": container.image, "resources": {}}))
            .collect();
        items.push(json!({
            "metadata": {"name": outline.name, "namespace": outline.namespace, "uid": uid},
            "spec": {"containers": containers},
            "status": {},
        }));
    }
    Ok(items)
}

/// A file of the machine's logs, or the list of those in a folder. A link is followed as long as it stays among the
/// logs: containers may write there, and must not reach the host's other files this way.
pub async fn machine_logs(path: &str, url_path: &str) -> Response<Body> {
    let (root, path) = (LOGS.to_owned(), path.to_owned());
    let opened = tokio::task::spawn_blocking(move || open(Path::new(&root), &path)).await;
    match opened.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(Opened::Folder(names)) if url_path.ends_with('/') => listing(&names),
        // Relative links in the list need the slash.
        Ok(Opened::Folder(_)) => {
            let mut response = text(StatusCode::MOVED_PERMANENTLY, "");
            let folder = format!("{}/", url_path.rsplit('/').next().unwrap_or_default());
            if let Ok(location) = HeaderValue::from_str(&folder) {
                response.headers_mut().insert("location", location);
            }
            response
        }
        Ok(Opened::File(file, length)) => {
            let file = tokio::fs::File::from_std(file.into()).take(length);
            let frames = tokio_util::io::ReaderStream::new(file);
            let body = StreamBody::new(frames.map_ok(Frame::data).map_err(Into::into));
            let mut response = Response::new(body.boxed_unsync());
            let headers = response.headers_mut();
            headers.insert("content-length", HeaderValue::from(length));
            headers.insert(
                "content-type",
                HeaderValue::from_static("text/plain; charset=utf-8"),
            );
            response
        }
        Err(_) => text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

enum Opened {
    /// The names of its entries, folders with a slash.
    Folder(Vec<String>),
    /// A regular file and its present length: a log that grows meanwhile has an end all the same.
    File(OwnedFd, u64),
}

fn open(root: &Path, path: &str) -> io::Result<Opened> {
    let root = openat(
        CWD,
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let path = if path.is_empty() { "." } else { path };
    // Not blocking: a pipe among the logs must not hold a thread.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = openat2(&root, path, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            let mut names = Vec::new();
            for entry in Dir::read_from(&file)? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if name != "." && name != ".." {
                    let slash = if entry.file_type().is_dir() { "/" } else { "" };
                    names.push(name + slash);
                }
            }
            names.sort();
            Ok(Opened::Folder(names))
        }
        FileType::RegularFile => Ok(Opened::File(file, u64::try_from(stat.st_size).unwrap_or(0))),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a file")),
    }
}

/// As Go's file server shows a folder.
fn listing(names: &[String]) -> Response<Body> {
    let mut page =
        String::from("<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n");
    for name in names {
        let link: String = name.bytes().fold(String::new(), |mut link, byte| {
            if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
                link.push(char::from(byte));
            } else {
                link.push_str(&format!("%{byte:02X}"));
            }
            link
        });
        let shown = name
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;");
        page.push_str(&format!("<a href=\"./{link}\">{shown}</a>\n"));
    }
    page.push_str("</pre>\n");
    let mut response = text(StatusCode::OK, Bytes::from(page));
    let headers = response.headers_mut();
    headers.insert(
        "content-type",
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_all_that_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("log");
        std::fs::create_dir_all(root.join("pods")).unwrap();
        std::fs::write(root.join("syslog"), "hello").unwrap();
        std::fs::write(dir.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink("syslog", root.join("inside")).unwrap();
        std::os::unix::fs::symlink("../secret", root.join("outside")).unwrap();
        std::os::unix::fs::symlink("/", root.join("pods/root")).unwrap();
        let length = |path: &str| match open(&root, path) {
            Ok(Opened::File(_, length)) => Some(length),
            _ => None,
        };
        assert_eq!((length("syslog"), length("inside")), (Some(5), Some(5)));
        for path in [
            "outside",
            "../secret",
            "pods/root/etc/passwd",
            "/etc/passwd",
            "none",
            "pods",
        ] {
            assert_eq!(length(path), None, "{path}");
        }
        match open(&root, "") {
            Ok(Opened::Folder(names)) => assert_eq!(names, ["inside", "outside", "pods/", "syslog"]),
            _ => panic!("not a folder"),
        }
    }
}
