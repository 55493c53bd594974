//! Where in etcd the keys are, and whose they are. The rest of skiff knows keys as `/registry/…` and `/skiff/…`; with
//! another `--etcd-prefix` all of them are below that one. A key beside the objects names the cluster that owns them.
//!
//! A cluster that came from another store goes on with that one's revisions, though etcd began to count at 1: a note
//! says by how much skiff's revisions are ahead of etcd's, and since when: of before, etcd knows nothing. They are translated
//! where etcd's messages are made and read.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;

use super::client::{Again, Client, translate};
use super::proto::{
    Compare, CompareTarget, CompareValue, KeyValue, PutRequest, RangeResponse, Request, Response,
    ResponseHeader, TxnRequest, TxnResponse,
};
use super::transact::{TXN, op};
use super::{RANGE, bytes, range_of};
use crate::{Error, Result};

/// What this skiff reads. Format 2 is 1 with a note of how far revisions are ahead.
const FORMAT: i64 = 2;
/// What a new etcd gets: skiffs that know no more can use it.
const PLAIN_FORMAT: i64 = 1;
/// Where the registry has its keys.
const REGISTRY: &str = "/registry/";
/// Where skiff notes things about the store.
const NOTES: &str = "/skiff/";
/// Below the prefix, but of no group that upstream knows: its API server passes it over.
const OWNER: &str = "/registry/skiff.io/owner";
const AHEAD: &str = "/skiff/revisions-ahead";

/// The cluster that owns the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The same for all API servers of a cluster, and only for them.
    pub id: String,
    /// What people call it.
    pub name: String,
}

pub struct KeyPrefix {
    /// With its `/`.
    root: String,
    owner: Option<Owner>,
    /// By how much skiff's revisions are ahead of etcd's.
    ahead: AtomicI64,
    /// The first revision of etcd at which it had everything; 0: from the beginning.
    first: AtomicI64,
}

impl KeyPrefix {
    pub fn new(prefix: &str, owner: Option<Owner>) -> KeyPrefix {
        let path = prefix.trim_matches('/');
        let root = if path.is_empty() {
            "/".to_owned()
        } else {
            format!("/{path}/")
        };
        KeyPrefix {
            root,
            owner,
            ahead: AtomicI64::new(0),
            first: AtomicI64::new(0),
        }
    }

    /// What all keys of objects begin with.
    pub fn root(&self) -> &str {
        &self.root
    }

    fn is_usual(&self) -> bool {
        self.root == REGISTRY
    }

    pub fn outer<'a>(&self, key: &'a str) -> Cow<'a, str> {
        if self.is_usual() {
            return Cow::Borrowed(key);
        }
        if let Some(rest) = key.strip_prefix(REGISTRY) {
            return Cow::Owned(format!("{}{rest}", self.root));
        }
        match key.strip_prefix(NOTES) {
            Some(rest) => Cow::Owned(format!("{}skiff.io/{rest}", self.root)),
            None => Cow::Borrowed(key),
        }
    }

    pub fn inner(&self, key: &str) -> Arc<str> {
        match key.strip_prefix(&self.root) {
            Some(rest) if !self.is_usual() => format!("{REGISTRY}{rest}").into(),
            _ => key.into(),
        }
    }

    /// A revision of etcd as skiff knows it.
    pub fn inner_revision(&self, etcd: i64) -> i64 {
        etcd + self.ahead.load(Ordering::Relaxed)
    }

    /// A revision of skiff as etcd knows it.
    pub fn outer_revision(&self, skiff: i64) -> i64 {
        skiff - self.ahead.load(Ordering::Relaxed)
    }

    /// The oldest revision of skiff that can be read.
    pub fn floor(&self) -> i64 {
        self.inner_revision(self.first.load(Ordering::Relaxed))
    }

    /// The range of the notes, which are beside the objects where the prefix is the usual one.
    pub fn notes(&self) -> Option<&'static str> {
        self.is_usual().then_some(NOTES)
    }

    pub fn owner_key(&self) -> Cow<'static, str> {
        self.outer(OWNER)
    }

    /// What a store that is filled from another one is given at last: with it, it can be used.
    pub fn notes_of_copy(&self, ahead: i64, first: i64) -> Vec<(String, String)> {
        let mut notes = vec![
            (self.outer(AHEAD).into_owned(), format!("{ahead} {first}")),
            (self.format_key().into_owned(), FORMAT.to_string()),
        ];
        if let Some(owner) = &self.owner {
            notes.push((self.owner_key().into_owned(), owner.value()));
        }
        notes
    }

    /// What tells which format the data has.
    pub fn format_key(&self) -> Cow<'static, str> {
        self.outer("/skiff/format")
    }

    /// Records the format and the owner in data that has none; refuses a newer format and another owner.
    pub async fn claim(&self, client: &Client) -> Result<ResponseHeader> {
        let key = self.format_key();
        let (found, header) = put_if_absent(client, &key, PLAIN_FORMAT.to_string()).await?;
        self.check_format(client, found).await?;
        let Some(owner) = &self.owner else {
            return Ok(header);
        };
        let key = self.outer(OWNER);
        let (found, header) = put_if_absent(client, &key, owner.value()).await?;
        let Some(kv) = found else { return Ok(header) };
        let text = String::from_utf8_lossy(&kv.value);
        let (id, name) = text.split_once(' ').unwrap_or((&text, ""));
        if id == owner.id {
            return Ok(header);
        }
        let (root, place) = (self.root.trim_end_matches('/'), &client.place);
        Err(Error::Invalid(format!(
            "the keys below {root:?} in {place} belong to another cluster ({name:?}): use another --etcd-prefix, or, if that cluster is gone and this one is to have its objects, delete the key {key}"
        )))
    }
}

impl KeyPrefix {
    /// What [`KeyPrefix::claim`] checks, without writing anything.
    pub async fn look(&self, client: &Client) -> Result<ResponseHeader> {
        let answer: RangeResponse = client
            .call(RANGE, range_of(&self.format_key()), Again::Yes)
            .await
            .map_err(|status| translate(status, 0, 0))?;
        self.check_format(client, answer.kvs.into_iter().next()).await?;
        Ok(answer.header.unwrap_or_default())
    }

    /// Refuses a newer format, and reads how far revisions are ahead.
    async fn check_format(&self, client: &Client, found: Option<KeyValue>) -> Result<()> {
        let (mut ahead, mut first) = (0, 0);
        if let Some(kv) = found {
            let text = String::from_utf8_lossy(&kv.value);
            let Ok(found) = text.trim().parse::<i64>() else {
                let key = self.format_key();
                return Err(Error::Corrupt(format!("{key} in {} is {text:?}", client.place)));
            };
            if found > FORMAT {
                return Err(Error::NewerVersion {
                    place: client.place.clone(),
                    found,
                    known: FORMAT,
                    flag: "--etcd-servers",
                });
            }
            if found > PLAIN_FORMAT {
                (ahead, first) = self.read_ahead(client).await?;
            }
        }
        self.ahead.store(ahead, Ordering::Relaxed);
        self.first.store(first, Ordering::Relaxed);
        Ok(())
    }

    async fn read_ahead(&self, client: &Client) -> Result<(i64, i64)> {
        let key = self.outer(AHEAD);
        let answer: RangeResponse = client
            .call(RANGE, range_of(&key), Again::Yes)
            .await
            .map_err(|status| translate(status, 0, 0))?;
        let text = answer.kvs.first().map(|kv| String::from_utf8_lossy(&kv.value));
        let ahead = text.as_ref().and_then(|text| {
            let (ahead, first) = text.trim().split_once(' ')?;
            Some((ahead.parse().ok()?, first.parse().ok()?))
        });
        ahead.ok_or_else(|| Error::Corrupt(format!("{key} in {} is {text:?}", client.place)))
    }
}

impl Owner {
    /// As it is stored.
    pub(super) fn value(&self) -> String {
        format!("{} {}", self.id, self.name)
    }
}

/// The key as it was, if it was there already. Doing it twice does no harm.
async fn put_if_absent(
    client: &Client,
    key: &str,
    value: String,
) -> Result<(Option<KeyValue>, ResponseHeader)> {
    let put = PutRequest {
        key: bytes(key),
        value: Bytes::from(value),
        ..Default::default()
    };
    let absent = Compare {
        result: 0,
        target: CompareTarget::Mod.into(),
        key: bytes(key),
        value: Some(CompareValue::ModRevision(0)),
    };
    let request = TxnRequest {
        compare: vec![absent],
        success: vec![op(Request::Put(put))],
        failure: vec![op(Request::Range(range_of(key)))],
    };
    let answer: TxnResponse = client
        .call(TXN, request, Again::Yes)
        .await
        .map_err(|status| translate(status, 0, 0))?;
    let found = answer.responses.into_iter().find_map(|one| match one.response {
        Some(Response::Range(range)) => range.kvs.into_iter().next(),
        _ => None,
    });
    Ok((found, answer.header.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_below_the_prefix() {
        let check = |prefix: &str, key: &str, expected: &str| {
            let place = KeyPrefix::new(prefix, None);
            assert_eq!(place.outer(key), expected, "{prefix}");
            if key.starts_with(REGISTRY) {
                assert_eq!(&*place.inner(expected), key, "{prefix}");
            }
        };
        for prefix in ["/registry", "registry", "/registry/"] {
            check(prefix, "/registry/pods/a/b", "/registry/pods/a/b");
            check(prefix, "/skiff/format", "/skiff/format");
        }
        check("/a/b", "/registry/pods/a/b", "/a/b/pods/a/b");
        check("a", "/skiff/format", "/a/skiff.io/format");
        check("/", "/registry/pods/", "/pods/");
        check("a", "/elsewhere/x", "/elsewhere/x");
    }
}
