//! Digests: of bytes, of layers on top of others, and what may pass for one.

use super::Error;
use sha2::{Digest, Sha256};

/// Whether it is `sha256:` and 64 hexadecimal digits. Digests become names of files, so what an image
/// says must not get that far unchecked: a "digest" `sha256:/` would be the host's root directory.
pub(super) fn is_digest(digest: &str) -> bool {
    digest.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

pub(super) fn hex_of(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

/// A layer's directory is named by the whole digest of its chain. Earlier versions used 16 digits of it, few
/// enough to find another layer of that name: those directories serve the images that have them until these
/// are pulled again.
pub(super) fn layer_name(chain: &str) -> String {
    hex_of(chain).to_owned()
}

pub(crate) fn digest_of(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

pub(super) fn expect_digest(what: &str, expected: &str, actual: &str) -> Result<(), Error> {
    if expected == actual {
        return Ok(());
    }
    Err(Error::Digest {
        what: what.to_owned(),
        expected: expected.to_owned(),
        actual: actual.to_owned(),
    })
}

/// The chain of a layer: a digest over itself and all below it. The only way from an image's own words
/// to layers' names.
pub(super) fn chain_ids(diff_ids: &[String], limit: usize) -> Result<Vec<String>, Error> {
    if diff_ids.len() > limit {
        return Err(Error::Archive(format!(
            "the image has {} layers, more than {limit}",
            diff_ids.len()
        )));
    }
    let mut chain: Vec<String> = Vec::with_capacity(diff_ids.len());
    for diff_id in diff_ids {
        if !is_digest(diff_id) {
            return Err(Error::Archive(format!("{diff_id:?} is not a sha256 digest")));
        }
        let next = match chain.last() {
            None => diff_id.clone(),
            Some(below) => digest_of(format!("{below} {diff_id}").as_bytes()),
        };
        chain.push(next);
    }
    Ok(chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_by_digests_only() {
        let check = |diff_id: &str, expected: bool| {
            assert_eq!(chain_ids(&[diff_id.to_owned()], 1).is_ok(), expected, "{diff_id}");
        };
        let digest = format!("sha256:{}", "0a".repeat(32));
        check(&digest, true);
        check("sha256:/", false);
        check("sha256:../../..", false);
        check("sha256:", false);
        check(&digest.to_uppercase(), false);
        check(digest.trim_start_matches("sha256:"), false);
        check(&format!("{digest}0"), false);
    }
}
