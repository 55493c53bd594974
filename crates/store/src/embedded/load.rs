//! Fills a new store with what another one holds: keys keep their revisions, and history starts after them.
//!
//! It writes in batches, so that no more than one of them is in memory. Nobody may use the folder meanwhile; one that was
//! not finished is of no use and is to be removed.

use std::collections::HashSet;
use std::path::Path;

use super::disk::{Disk, Row};
use crate::{Error, KeyValue, Result};

/// What is committed at once.
const BATCH_ROWS: usize = 500;
const BATCH_BYTES: usize = 4 << 20;

pub struct Loader {
    disk: Disk,
    batch: Vec<Row>,
    batch_bytes: usize,
    /// The revisions that are taken: here each belongs to one key, in etcd a transaction gives one to several.
    taken: HashSet<i64>,
    newest: i64,
}

impl Loader {
    /// A store in `dir`, which must be new, that will be at `revision` or later when it is finished.
    pub fn create(dir: &Path, revision: i64) -> Result<Loader> {
        let disk = Disk::open(dir)?;
        let mut rows = 0;
        disk.load(0, |_| rows += 1)?;
        if rows > 0 {
            return Err(Error::Invalid(format!("{} holds data already", dir.display())));
        }
        Ok(Loader {
            disk,
            batch: Vec::new(),
            batch_bytes: 0,
            taken: HashSet::new(),
            newest: revision.max(1),
        })
    }

    /// `expires` is Unix time in seconds; 0: never.
    pub fn put(&mut self, item: KeyValue, expires: u64) -> Result<()> {
        let mut revision = item.mod_revision;
        if revision <= 1 || revision > self.newest || !self.taken.insert(revision) {
            self.newest += 1;
            revision = self.newest;
            self.taken.insert(revision);
        }
        self.batch_bytes += item.key.len() + item.value.len();
        self.batch.push(Row {
            revision,
            key: item.key,
            create_revision: item.create_revision.clamp(1, revision),
            value: Some(item.value),
            expires,
        });
        if self.batch.len() >= BATCH_ROWS || self.batch_bytes >= BATCH_BYTES {
            self.commit()?;
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        self.disk.commit(self.batch.iter())?;
        self.batch.clear();
        self.batch_bytes = 0;
        Ok(())
    }

    /// Everything is on disk when this returns. The revision is the one that the store is at.
    pub fn finish(mut self) -> Result<i64> {
        self.commit()?;
        self.disk.compact(&[], self.newest)?;
        Ok(self.newest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Embedded, Expect, Op, Outcome, Store};
    use bytes::Bytes;

    fn item(key: &str, create_revision: i64, mod_revision: i64) -> KeyValue {
        KeyValue {
            key: key.into(),
            value: Bytes::from_static(b"v"),
            create_revision,
            mod_revision,
        }
    }

    #[tokio::test]
    async fn revisions_are_kept_and_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut loader = Loader::create(dir.path(), 100).unwrap();
        loader.put(item("/registry/a", 3, 7), 0).unwrap();
        loader.put(item("/registry/b", 9, 9), 0).unwrap();
        // Of the same transaction, and from the future.
        loader.put(item("/registry/c", 9, 9), 0).unwrap();
        loader.put(item("/registry/d", 500, 500), 0).unwrap();
        assert_eq!(loader.finish().unwrap(), 102);
        assert!(Loader::create(dir.path(), 1).is_err(), "it is not new any more");
        let store = Embedded::open(dir.path()).unwrap();
        let found = store.range("/registry/", None, 0, None).await.unwrap();
        let revisions: Vec<_> = found
            .items
            .iter()
            .map(|kv| (kv.create_revision, kv.mod_revision))
            .collect();
        assert_eq!(revisions, [(3, 7), (9, 9), (9, 101), (102, 102)]);
        assert_eq!(found.revision, 102);
        let told = store.watch("/registry/", 50).await.map(drop);
        assert_eq!(told, Err(Error::Compacted { revision: 102 }));
        let put = Op::Put(Bytes::from_static(b"w"));
        let written = store
            .write("/registry/a", Expect::Revision(7), put, None)
            .await
            .unwrap();
        assert!(
            matches!(written, Outcome::Done { revision: 103, .. }),
            "{written:?}"
        );
    }
}
