//! The OpenAPI documents of extension API servers. Version 3 is one document a group version: the index of ours
//! names theirs, and a request for one is passed on. Version 2 is one document for all.

use std::sync::Arc;

use http::{StatusCode, header};
use serde_json::Value;

use super::{Remote, fetch};
use crate::server::Inner;

/// What an extension API server has of OpenAPI.
#[derive(Default)]
pub struct RemoteDocuments {
    /// The address of the group version's document, with its hash, relative to the server.
    pub v3_url: Option<String>,
}

/// Looks again for the documents. What cannot be had stays as it was.
pub async fn refresh(remote: &Arc<Remote>, inner: &Arc<Inner>) {
    if let Ok(Ok(found)) = tokio::time::timeout(fetch::LIMIT, v3_url(remote, inner)).await {
        remote.documents.lock().v3_url = found;
    }
}

async fn v3_url(remote: &Arc<Remote>, inner: &Arc<Inner>) -> Result<Option<String>, String> {
    let target = fetch::target(inner, remote).await?;
    let index = fetch::get(&target, "/openapi/v3", &[(header::ACCEPT, "application/json")]).await?;
    match index.code {
        StatusCode::OK => {}
        StatusCode::NOT_FOUND => return Ok(None),
        other => return Err(other.to_string()),
    }
    let index: Value = serde_json::from_slice(&index.body).map_err(|error| error.to_string())?;
    let key = remote.path();
    let url = &index["paths"][key.trim_start_matches('/')]["serverRelativeURL"];
    Ok(url.as_str().map(str::to_string))
}
