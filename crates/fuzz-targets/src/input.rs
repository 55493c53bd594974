//! How an input is read: text that a person can write and a fuzzer can mutate. A first line names a kind, and a line
//! of three dashes stands between two documents.

use std::sync::{Arc, LazyLock};

use serde_json::Value;
use skiff_api::facts;
use skiff_meta::GroupVersionKind;
use skiff_registry::hooks::NoHook;
use skiff_registry::{Resource, Resources};
use skiff_schema::decode::{self, Document, Format};
use skiff_schema::{Schema, TypeId};

/// A kind that bodies may be of.
pub struct Kind {
    pub gvk: GroupVersionKind,
    pub id: TypeId,
    /// Absent for what is no resource, such as `DeleteOptions`.
    pub resource: Option<Arc<Resource>>,
}

static RESOURCES: LazyLock<Resources> =
    LazyLock::new(|| Resources::new(&facts::RuntimeConfig::default(), |_| Arc::new(NoHook)));

/// Bodies that no resource is made of.
const OTHERS: &[(&str, &str)] = &[
    ("v1", "DeleteOptions"),
    ("v1", "Status"),
    ("v1", "List"),
    ("v1", "Binding"),
    ("policy/v1", "Eviction"),
    ("autoscaling/v1", "Scale"),
    ("authentication.k8s.io/v1", "TokenRequest"),
    ("v1", "PodList"),
    ("apps/v1", "DeploymentList"),
];

static KINDS: LazyLock<Vec<Kind>> = LazyLock::new(|| {
    let mut kinds: Vec<Kind> = RESOURCES
        .all()
        .iter()
        .map(|resource| Kind {
            gvk: GroupVersionKind::new(resource.facts.group, resource.facts.version, resource.facts.kind),
            id: resource.facts.type_id,
            resource: Some(resource.clone()),
        })
        .collect();
    for (api_version, kind) in OTHERS {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let meta = format!("io.k8s.apimachinery.pkg.apis.meta.v1.{kind}");
        let found = schema()
            .by_gvk(group, version, kind)
            .or_else(|| schema().by_name(&meta));
        if let Some(id) = found
            && kinds.iter().all(|known| known.id != id)
        {
            kinds.push(Kind {
                gvk: GroupVersionKind::new(group, version, *kind),
                id,
                resource: None,
            });
        }
    }
    kinds
});

pub fn schema() -> &'static Schema {
    facts::schema()
}

/// The kind that a line such as `apps/v1 Deployment` names. Any other line names one too: a fuzzer shall not have
/// to find the words.
pub fn kind(line: &[u8]) -> &'static Kind {
    let hash = line.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let named = std::str::from_utf8(line).ok().and_then(|line| {
        let (api_version, kind) = line.trim().split_once(' ')?;
        KINDS
            .iter()
            .find(|known| known.gvk.kind == kind && known.gvk.api_version() == api_version)
    });
    named.unwrap_or_else(|| &KINDS[(hash % KINDS.len() as u64) as usize])
}

/// The first line, and what follows.
pub fn line(data: &[u8]) -> (&[u8], &[u8]) {
    match data.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (&[], data),
    }
}

/// Documents between lines of three dashes.
pub fn documents<const N: usize>(data: &[u8]) -> Option<[&[u8]; N]> {
    const BETWEEN: &[u8] = b"\n---\n";
    let mut found = [&data[..0]; N];
    let mut rest = data;
    for (at, document) in found.iter_mut().enumerate() {
        if at + 1 == N {
            *document = rest;
        } else {
            let end = rest.windows(BETWEEN.len()).position(|window| window == BETWEEN)?;
            *document = &rest[..end];
            rest = &rest[end + BETWEEN.len()..];
        }
    }
    Some(found)
}

/// A document that is JSON, as the server reads it.
pub fn json(document: &[u8]) -> Option<Value> {
    decode::from_json(document).ok().map(|decoded| decoded.value)
}

/// An object of a type in the shape of an answer.
pub fn object(id: TypeId, document: &[u8]) -> Option<Value> {
    let document = Document::parse(document, Format::Json).ok()?;
    let mut value = document.check(schema(), id).ok()?.value;
    skiff_schema::normalise(schema(), id, &mut value);
    Some(value)
}

/// How many bytes a value takes on the wire.
pub fn size(value: &Value) -> usize {
    serde_json::to_vec(value).map_or(0, |bytes| bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_has_a_type() {
        for (api_version, name) in OTHERS {
            let found = kind(format!("{api_version} {name}").as_bytes());
            assert_eq!(found.gvk.kind, *name);
        }
    }

    #[test]
    fn documents_are_split() {
        assert_eq!(
            documents::<2>(b"a\n---\nb\n---\nc"),
            Some([&b"a"[..], b"b\n---\nc"])
        );
        assert_eq!(documents::<2>(b"a"), None);
    }
}
