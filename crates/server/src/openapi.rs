//! `/openapi/v2` and `/openapi/v3`: documents made at first use and kept as bytes.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use skiff_meta::Status;

use crate::body::{self, Answer, not_found};
use crate::chain::Exchange;
use crate::compress;
use crate::server::Inner;

/// The documents made so far, by path and form. Leaf lock: documents are made outside of it.
#[derive(Default)]
pub struct Documents {
    made: Mutex<HashMap<String, Document>>,
}

#[derive(Clone)]
struct Document {
    bytes: Bytes,
    etag: String,
}

/// A strong tag of the content, quoted.
pub fn etag(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02X}")).collect();
    format!("\"{hex}\"")
}

pub fn route(_: &Arc<Inner>, _: &Exchange, _: &[&str]) -> Result<Answer, Status> {
    Ok(not_found())
}
