//! Which API servers there are: each keeps a key with a lease, as upstream's do and under upstream's prefix, and the
//! endpoints of the service `kubernetes` are all whose key is there. So no server removes another that is alive.

use std::net::IpAddr;

use serde_json::json;
use skiff_meta::Status;
use skiff_store::{Expect, Op};

use crate::{Registry, errors, object};

const PREFIX: &str = "/registry/masterleases/";
/// COMPAT: upstream's number. The key is written again every 10 s (`server/src/hooks/repair.rs`).
const LEASE_SECONDS: i64 = 15;

impl Registry {
    /// Says that the server at this address is there; the addresses of all, sorted.
    pub(super) async fn api_servers(&self, own: IpAddr) -> Result<Vec<IpAddr>, Status> {
        let resource = self.resources.get("", "v1", "endpoints");
        let resource = resource.ok_or_else(|| Status::internal("no resource endpoints"))?;
        let record = json!({"kind": "Endpoints", "apiVersion": "v1",
            "subsets": [{"addresses": [{"ip": own.to_string()}]}]});
        let op = Op::Put(resource.codec.encode(&record)?);
        let key = format!("{PREFIX}{own}");
        // Nobody else writes the key of an address.
        let written = self.store.write(&key, Expect::Any, op, Some(LEASE_SECONDS));
        written.await.map_err(errors::store)?;
        let found = self.store.range(PREFIX, None, 0, None).await;
        let mut all = vec![own];
        for item in found.map_err(errors::store)?.items {
            let Ok(record) = resource.read(&item) else {
                continue;
            };
            let address: Option<IpAddr> = object::at(&record, &["subsets"])
                .and_then(|subsets| subsets.pointer("/0/addresses/0/ip"))
                .and_then(|address| address.as_str())
                .and_then(|address| address.parse().ok());
            all.extend(address);
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }
}
