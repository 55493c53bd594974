//! The directories of local volumes, which the provisioner beside the API server asks for. Who may: whoever may use the
//! node's proxy, as for everything that changes something on a node.

use http::{Method, Response, StatusCode};
use skiff_streaming::Body;
use std::io;

use super::{json, text};
use crate::local_volumes::{Folder, Removal};

/// What is asked of the volumes: `name` is the rest of the path.
pub async fn serve(
    folder: Option<Folder>,
    method: &Method,
    name: &[&str],
    query: &[(String, String)],
) -> Response<Body> {
    let Some(folder) = folder else {
        return text(StatusCode::NOT_FOUND, "404 page not found\n");
    };
    let only_empty = query.iter().any(|(key, value)| key == "empty" && value == "true");
    match (method, name) {
        (&Method::GET, []) => answer(work(move || folder.offer()).await.map(|offer| json(&offer))),
        (&Method::PUT, [name]) => {
            let name = (*name).to_owned();
            answer(
                work(move || folder.make(&name))
                    .await
                    .map(|()| text(StatusCode::OK, "")),
            )
        }
        (&Method::DELETE, [name]) => {
            let name = (*name).to_owned();
            let removed = work(move || match only_empty {
                true => folder.remove_empty(&name),
                false => folder.remove(&name),
            })
            .await;
            answer(removed.map(|removed| match removed {
                Removal::Done => text(StatusCode::OK, ""),
                Removal::Mounted => text(StatusCode::CONFLICT, "the volume is mounted by a pod"),
                Removal::Kept => text(StatusCode::CONFLICT, "the volume is not empty"),
            }))
        }
        _ => text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n"),
    }
}

/// Disk work, off the runtime's threads.
async fn work<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(io::Error::other(error)),
    }
}

fn answer(result: io::Result<Response<Body>>) -> Response<Body> {
    result.unwrap_or_else(|error| {
        let status = match error.kind() {
            io::ErrorKind::InvalidInput => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        text(status, error.to_string())
    })
}
