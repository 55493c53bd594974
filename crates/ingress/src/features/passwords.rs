//! The hashes of passwords that htpasswd files have: bcrypt, apr1 (and crypt's MD5), SHA-1 with and without a salt, and
//! plain text. Others are refused by name.

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::md5::md5;

/// Above, one password takes a processor for seconds.
const MAX_COST: u32 = 14;
const SHA1_BYTES: usize = 20;
const ALPHABET: &[u8; 64] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hash {
    Bcrypt(String),
    Md5 {
        magic: &'static str,
        salt: String,
        hash: String,
    },
    /// The digest, and what follows the password in it.
    Sha1 {
        digest: Vec<u8>,
        salt: Vec<u8>,
    },
    Plain(String),
}

impl Hash {
    pub fn parse(text: &str) -> Result<Hash, String> {
        if let Some(rest) = ["$2y$", "$2b$", "$2a$"]
            .iter()
            .find_map(|prefix| text.strip_prefix(prefix))
        {
            let cost = rest
                .split_once('$')
                .and_then(|(cost, _)| cost.parse::<u32>().ok());
            return match cost {
                Some(cost) if cost > MAX_COST => {
                    Err(format!("bcrypt with a cost above {MAX_COST} is not supported"))
                }
                Some(4..) if text.len() == 60 && text.is_ascii() => Ok(Hash::Bcrypt(text.to_owned())),
                _ => Err("a malformed bcrypt hash".to_owned()),
            };
        }
        for magic in ["$apr1$", "$1$"] {
            let Some((salt, hash)) = text.strip_prefix(magic).and_then(|rest| rest.split_once('$')) else {
                continue;
            };
            if salt.len() > 8 || hash.len() != 22 {
                return Err("a malformed MD5 hash".to_owned());
            }
            return Ok(Hash::Md5 {
                magic,
                salt: salt.to_owned(),
                hash: hash.to_owned(),
            });
        }
        if let Some(encoded) = text.strip_prefix("{SHA}").or_else(|| text.strip_prefix("{SSHA}")) {
            let mut digest = STANDARD.decode(encoded).map_err(|_| "a malformed SHA-1 hash")?;
            if digest.len() < SHA1_BYTES || (text.starts_with("{SHA}") && digest.len() > SHA1_BYTES) {
                return Err("a malformed SHA-1 hash".to_owned());
            }
            let salt = digest.split_off(SHA1_BYTES);
            return Ok(Hash::Sha1 { digest, salt });
        }
        if let Some(plain) = text.strip_prefix("{PLAIN}") {
            return Ok(Hash::Plain(plain.to_owned()));
        }
        let name = match text {
            text if text.starts_with("$5$") || text.starts_with("$6$") => "SHA-crypt",
            text if text.starts_with("$y$") => "yescrypt",
            text if text.starts_with("$argon2") => "Argon2",
            text if text.starts_with("$2") => "this variant of bcrypt",
            _ => "crypt (DES), or a hash without a name,",
        };
        Err(format!(
            "{name} is not supported; bcrypt, apr1, SHA-1 and {{PLAIN}} are"
        ))
    }

    /// Whether checking a password takes long enough to be done elsewhere.
    pub fn is_slow(&self) -> bool {
        matches!(self, Hash::Bcrypt(_) | Hash::Md5 { .. })
    }

    pub fn verify(&self, password: &[u8]) -> bool {
        match self {
            // What is behind byte 72 does not count, in any implementation.
            Hash::Bcrypt(hash) => bcrypt::verify(password, hash).unwrap_or(false),
            Hash::Md5 { magic, salt, hash } => same(
                md5_crypt(password, magic.as_bytes(), salt.as_bytes()).as_bytes(),
                hash.as_bytes(),
            ),
            Hash::Sha1 { digest: hash, salt } => {
                let found = digest(&SHA1_FOR_LEGACY_USE_ONLY, &[password, salt.as_slice()].concat());
                same(found.as_ref(), hash)
            }
            Hash::Plain(plain) => same(plain.as_bytes(), password),
        }
    }
}

fn same(a: &[u8], b: &[u8]) -> bool {
    verify_slices_are_equal(a, b).is_ok()
}

/// As Apache and crypt(3) make it from a password.
fn md5_crypt(password: &[u8], magic: &[u8], salt: &[u8]) -> String {
    let inner = md5(&[password, salt, password]);
    let mut text = [password, magic, salt].concat();
    text.extend((0..password.len()).map(|at| inner[at % inner.len()]));
    let mut length = password.len();
    while length > 0 {
        text.push(match length % 2 {
            1 => 0,
            _ => password[0],
        });
        length /= 2;
    }
    let mut digest = md5(&[&text]);
    for round in 0..1000 {
        let (first, last) = match round % 2 {
            1 => (password, &digest[..]),
            _ => (&digest[..], password),
        };
        let salt = if round % 3 == 0 { &b""[..] } else { salt };
        let middle = if round % 7 == 0 { &b""[..] } else { password };
        digest = md5(&[first, salt, middle, last]);
    }
    let d = |at: usize| u32::from(digest[at]);
    let mut encoded = String::new();
    let mut put = |mut value: u32, count: usize| {
        for _ in 0..count {
            encoded.push(ALPHABET[(value & 63) as usize].into());
            value >>= 6;
        }
    };
    for (a, b, c) in [(0, 6, 12), (1, 7, 13), (2, 8, 14), (3, 9, 15), (4, 10, 5)] {
        put(d(a) << 16 | d(b) << 8 | d(c), 4);
    }
    put(d(11), 2);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_checked_against_hashes_of_other_programs() {
        for hash in [
            "$apr1$abcdefgh$h9FWgUz3n9YxylKLlR5SQ/",
            "$1$abcdefgh$cHJi5PXp/ki/ktXzqlk6I1",
            "{SHA}5en6G6MezRroT3XKqkdPOmY/BfQ=",
            "{PLAIN}secret",
            "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a",
        ] {
            let parsed = Hash::parse(hash).expect("a hash");
            assert!(parsed.verify(b"secret"), "{hash}");
            for wrong in ["", "Secret", "secret ", "secre"] {
                assert!(!parsed.verify(wrong.as_bytes()), "{hash} {wrong}");
            }
        }
        let salted = [digest(&SHA1_FOR_LEGACY_USE_ONLY, b"secretsalt").as_ref(), b"salt"].concat();
        let parsed = Hash::parse(&format!("{{SSHA}}{}", STANDARD.encode(salted))).expect("a hash");
        assert!(parsed.verify(b"secret") && !parsed.verify(b"secretsalt"));
    }

    #[test]
    fn others_are_refused_by_name() {
        for (text, expected) in [
            ("$6$salt$x", "SHA-crypt"),
            ("$y$x", "yescrypt"),
            ("rl0uE3JpVQH7k", "DES"),
            (
                "$2y$31$abcdefghijklmnopqrstuu5Lo0g67CiD3M4RpN1BmBb4Crp5w7dbK",
                "cost above",
            ),
            ("$2y$05$short", "malformed"),
            (
                "$2x$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a",
                "variant",
            ),
            ("{SHA}x", "malformed"),
            ("$apr1$toolongsalt$x", "malformed"),
            ("", "without a name"),
            ("secret", "without a name"),
        ] {
            let refused = Hash::parse(text).expect_err("refused");
            assert!(refused.contains(expected), "{text}: {refused}");
        }
    }
}
