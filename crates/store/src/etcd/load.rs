//! Fills an empty prefix of etcd with what another store holds.
//!
//! etcd gives each write a revision of its own. So that clients never see a revision go back, the first write counts as
//! the one after the other store's last: a note says how far skiff's revisions are ahead ([`super::key_prefix`]). The
//! notes are written last; until then the keys belong to nobody, and no skiff starts on them.

use bytes::Bytes;

use super::client::{Again, Client, translate};
use super::key_prefix::KeyPrefix;
use super::lease::Leases;
use super::proto::{
    DeleteRangeRequest, DeleteRangeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse,
};
use super::{Options, Owner, RANGE, bytes, prefix_end, range_of};
use crate::{Error, Result};

const PUT: &str = "/etcdserverpb.KV/Put";
const DELETE: &str = "/etcdserverpb.KV/DeleteRange";

/// The owner of keys that are not all there yet.
const UNFINISHED: &str = "unfinished";

pub struct Loader {
    client: Client,
    place: KeyPrefix,
    leases: Leases,
    ahead: i64,
}

impl Loader {
    /// Refuses a prefix that has keys.
    pub async fn check(options: &Options) -> Result<()> {
        Loader::open(options, 0).await.map(drop)
    }

    /// Begins to fill a prefix, which must have no keys. The store that is made goes on after `revision`.
    pub async fn create(options: &Options, revision: i64) -> Result<Loader> {
        let loader = Loader::open(options, revision).await?;
        // Of a cluster whose objects are gone.
        loader.delete_notes().await?;
        let unfinished = Owner {
            id: UNFINISHED.to_owned(),
            name: "a migration that was not finished".to_owned(),
        };
        let value = Bytes::from(unfinished.value());
        loader.put_outer(&loader.place.owner_key(), value, 0).await?;
        Ok(loader)
    }

    async fn open(options: &Options, revision: i64) -> Result<Loader> {
        let client = Client::new(options)?;
        let place = KeyPrefix::new(&options.prefix, options.owner.clone());
        let request = RangeRequest {
            key: bytes(place.root()),
            range_end: prefix_end(place.root()),
            count_only: true,
            ..RangeRequest::default()
        };
        let found: RangeResponse = client
            .call(RANGE, request, Again::Yes)
            .await
            .map_err(|status| translate(status, 0, 0))?;
        if found.count > 0 {
            return Err(Error::Invalid(format!(
                "there are {} keys below {:?} in {}: choose another --etcd-prefix, or delete them if nobody needs them",
                found.count,
                place.root().trim_end_matches('/'),
                client.place
            )));
        }
        Ok(Loader {
            ahead: (revision - found.header.unwrap_or_default().revision).max(0),
            leases: Leases::default(),
            client,
            place,
        })
    }

    /// Writes one key. Many of these may be under way at once.
    pub async fn put(&self, key: &str, value: Bytes, lease_seconds: Option<i64>) -> Result<()> {
        let lease = match lease_seconds {
            Some(seconds) => self.leases.get(&self.client, seconds).await.map_err(failed)?,
            None => 0,
        };
        self.put_outer(&self.place.outer(key), value, lease).await
    }

    /// Writing the same once more does no harm.
    async fn put_outer(&self, key: &str, value: Bytes, lease: i64) -> Result<()> {
        let request = PutRequest {
            key: bytes(key),
            value,
            lease,
            prev_kv: false,
        };
        let done: Result<PutResponse, _> = self.client.call(PUT, request, Again::Yes).await;
        done.map(drop).map_err(failed)
    }

    /// Makes what was written a store of its owner.
    pub async fn finish(&self) -> Result<()> {
        let found: RangeResponse = self
            .client
            .call(RANGE, range_of(&self.place.owner_key()), Again::Yes)
            .await
            .map_err(failed)?;
        let first = found.header.unwrap_or_default().revision;
        for (key, value) in self.place.notes_of_copy(self.ahead, first) {
            self.put_outer(&key, Bytes::from(value), 0).await?;
        }
        Ok(())
    }

    /// Deletes everything that was written.
    pub async fn undo(&self) -> Result<()> {
        self.delete(self.place.root()).await?;
        self.delete_notes().await
    }

    async fn delete_notes(&self) -> Result<()> {
        match self.place.notes() {
            Some(notes) => self.delete(notes).await,
            None => Ok(()),
        }
    }

    async fn delete(&self, prefix: &str) -> Result<()> {
        let request = DeleteRangeRequest {
            key: bytes(prefix),
            range_end: prefix_end(prefix),
            prev_kv: false,
        };
        let done: Result<DeleteRangeResponse, _> = self.client.call(DELETE, request, Again::Yes).await;
        done.map(drop).map_err(failed)
    }
}

/// Gives the keys another owner, such as one that no server has: then nobody starts on them by mistake.
pub async fn hand_over(options: &Options, to: &Owner) -> Result<()> {
    let place = KeyPrefix::new(&options.prefix, None);
    let request = PutRequest {
        key: bytes(&place.owner_key()),
        value: Bytes::from(to.value()),
        ..PutRequest::default()
    };
    let done: Result<PutResponse, _> = Client::new(options)?.call(PUT, request, Again::Yes).await;
    done.map(drop).map_err(failed)
}

fn failed(status: tonic::Status) -> Error {
    translate(status, 0, 0)
}
