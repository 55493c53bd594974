//! The OpenAPI documents of extension API servers. Version 3 is one document a group version: the index of ours
//! names theirs, and a request for one is passed on. Version 2 is one document for all: theirs is fetched, and its
//! paths and definitions are added to ours when somebody asks for it.

use std::sync::{Arc, OnceLock};

use http::{StatusCode, header};
use serde_json::{Map, Value};
use skiff_schema::openapi::{Document, v2_protobuf};

use super::{Aggregator, Remote, fetch};
use crate::openapi::etag;
use crate::server::Inner;

/// What an extension API server has of OpenAPI.
#[derive(Default)]
pub struct RemoteDocuments {
    /// The address of the group version's document, with its hash, relative to the server.
    pub v3_url: Option<String>,
    v2: Option<Arc<GroupVersionDocument>>,
}

/// The part of a version 2 document that is of one group version.
struct GroupVersionDocument {
    etag: String,
    paths: Map<String, Value>,
    definitions: Map<String, Value>,
}

/// Our version 2 document with the parts of others, for as long as none of them changes.
pub struct Merged {
    of: Vec<String>,
    value: Value,
    json: OnceLock<Document>,
    protobuf: OnceLock<Document>,
}

impl Merged {
    pub fn json(&self) -> &Document {
        self.json
            .get_or_init(|| document(self.value.to_string().into_bytes()))
    }

    pub fn protobuf(&self) -> &Document {
        self.protobuf.get_or_init(|| document(v2_protobuf(&self.value)))
    }
}

fn document(bytes: Vec<u8>) -> Document {
    Document {
        etag: etag(&bytes),
        bytes,
    }
}

impl Aggregator {
    /// The version 2 document with what extension API servers add; `None` if they add nothing.
    pub fn v2(&self, ours: &Document) -> Option<Arc<Merged>> {
        let mut parts: Vec<(String, Arc<GroupVersionDocument>)> = self
            .remotes()
            .iter()
            .filter_map(|remote| Some((remote.name.clone(), remote.documents.lock().v2.clone()?)))
            .collect();
        if parts.is_empty() {
            return None;
        }
        parts.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut of = vec![ours.etag.clone()];
        of.extend(parts.iter().map(|(name, part)| format!("{name} {}", part.etag)));
        if let Some(merged) = self.merged.load_full()
            && merged.of == of
        {
            return Some(merged);
        }
        let mut value: Value = serde_json::from_slice(&ours.bytes).unwrap_or_default();
        for (_, part) in &parts {
            for (field, entries) in [("paths", &part.paths), ("definitions", &part.definitions)] {
                let Some(all) = value.get_mut(field).and_then(Value::as_object_mut) else {
                    continue;
                };
                // What both have is ours: types of the common machinery, mostly.
                for (key, entry) in entries {
                    all.entry(key.clone()).or_insert_with(|| entry.clone());
                }
            }
        }
        let merged = Arc::new(Merged {
            of,
            value,
            json: OnceLock::new(),
            protobuf: OnceLock::new(),
        });
        self.merged.store(Some(merged.clone()));
        Some(merged)
    }
}

/// Looks again for the documents. What cannot be had stays as it was.
pub async fn refresh(remote: &Arc<Remote>, inner: &Arc<Inner>) {
    if let Ok(Ok(found)) = tokio::time::timeout(fetch::LIMIT, v3_url(remote, inner)).await {
        remote.documents.lock().v3_url = found;
    }
    if let Ok(Ok(found)) = tokio::time::timeout(fetch::LIMIT, v2_part(remote, inner)).await {
        remote.documents.lock().v2 = found;
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

async fn v2_part(
    remote: &Arc<Remote>,
    inner: &Arc<Inner>,
) -> Result<Option<Arc<GroupVersionDocument>>, String> {
    let target = fetch::target(inner, remote).await?;
    let known = remote.documents.lock().v2.clone();
    let mut headers = vec![(header::ACCEPT, "application/json")];
    if let Some(known) = &known
        && !known.etag.is_empty()
    {
        headers.push((header::IF_NONE_MATCH, known.etag.as_str()));
    }
    let fetched = fetch::get(&target, "/openapi/v2", &headers).await?;
    match fetched.code {
        StatusCode::OK => {}
        StatusCode::NOT_MODIFIED => return Ok(known),
        StatusCode::NOT_FOUND => return Ok(None),
        other => return Err(other.to_string()),
    }
    let mut document: Value = serde_json::from_slice(&fetched.body).map_err(|error| error.to_string())?;
    let mut taken = |field: &str| match document.get_mut(field).map(Value::take) {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    };
    let (mut paths, definitions) = (taken("paths"), taken("definitions"));
    let own = remote.path();
    paths.retain(|path, _| {
        path.strip_prefix(own.as_str())
            .is_some_and(|rest| rest.starts_with('/'))
    });
    let tag = match fetched.header(header::ETAG) {
        "" => etag(&fetched.body),
        tag => tag.to_string(),
    };
    Ok(Some(Arc::new(GroupVersionDocument {
        etag: tag,
        paths,
        definitions,
    })))
}
