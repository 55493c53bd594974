//! The ciphers of upstream's local providers, in upstream's stored form: nonce first, then the ciphertext. The
//! authenticated data is the key under which a value is stored, so that a value that was copied to another key does
//! not open (but for AES-CBC and secretbox, which authenticate no such data).

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::cipher::{
    self, DecryptionContext, EncryptionContext, PaddedBlockDecryptingKey, PaddedBlockEncryptingKey,
    UnboundCipherKey,
};
use aws_lc_rs::hkdf::{self, HKDF_SHA256, Prk};
use crypto_secretbox::aead::Aead;
use crypto_secretbox::{KeyInit, XSalsa20Poly1305};

const GCM_NONCE: usize = 12;
const CBC_IV: usize = 16;
const SECRETBOX_NONCE: usize = 24;
/// The random part from which the key of one value is derived.
const INFO: usize = 32;
pub(crate) const SEED: usize = 32;

const TOO_SHORT: &str = "the stored data was shorter than the required size";

/// What a cipher makes of a value, or why it cannot.
pub(crate) type Result<T> = std::result::Result<T, String>;

pub(crate) enum Cipher {
    AesCbc(Box<(PaddedBlockEncryptingKey, PaddedBlockDecryptingKey)>),
    AesGcm(Box<LessSafeKey>),
    Secretbox(Box<XSalsa20Poly1305>),
    /// AES-GCM with a key per value, derived from a seed: the scheme of KMS v2.
    Seed(Prk),
}

impl Cipher {
    pub fn aes_cbc(key: &[u8]) -> Result<Cipher> {
        let algorithm = match key.len() {
            16 => &cipher::AES_128,
            24 => &cipher::AES_192,
            _ => &cipher::AES_256,
        };
        let unbound = || UnboundCipherKey::new(algorithm, key).map_err(bad_key);
        Ok(Cipher::AesCbc(Box::new((
            PaddedBlockEncryptingKey::cbc_pkcs7(unbound()?).map_err(bad_key)?,
            PaddedBlockDecryptingKey::cbc_pkcs7(unbound()?).map_err(bad_key)?,
        ))))
    }

    pub fn aes_gcm(key: &[u8]) -> Result<Cipher> {
        gcm(key).map(|key| Cipher::AesGcm(Box::new(key)))
    }

    pub fn secretbox(key: &[u8]) -> Result<Cipher> {
        let cipher = XSalsa20Poly1305::new_from_slice(key).map_err(bad_key)?;
        Ok(Cipher::Secretbox(Box::new(cipher)))
    }

    pub fn seed(seed: &[u8]) -> Result<Cipher> {
        if seed.len() < SEED {
            return Err(format!(
                "invalid seed length {} used for key generation",
                seed.len()
            ));
        }
        Ok(Cipher::Seed(Prk::new_less_safe(HKDF_SHA256, seed)))
    }

    pub fn open(&self, authenticated: &[u8], data: &[u8]) -> Result<Vec<u8>> {
        match self {
            Cipher::AesCbc(keys) => {
                let (iv, data) = split(data, CBC_IV)?;
                let iv: [u8; CBC_IV] = iv.try_into().map_err(|_| TOO_SHORT)?;
                let mut buffer = data.to_vec();
                let plain = { &keys.1 }
                    .decrypt(&mut buffer, DecryptionContext::Iv128(iv.into()))
                    .map_err(|_| "invalid padding on input")?
                    .len();
                buffer.truncate(plain);
                Ok(buffer)
            }
            Cipher::AesGcm(key) => open_gcm(key, authenticated, data),
            Cipher::Secretbox(cipher) => {
                let (nonce, data) = split(data, SECRETBOX_NONCE)?;
                cipher
                    .decrypt(nonce.into(), data)
                    .map_err(|_| "secretbox: message authentication failed".to_owned())
            }
            Cipher::Seed(seed) => {
                let (info, data) = split(data, INFO)?;
                open_gcm(&derive(seed, info)?, authenticated, data)
            }
        }
    }

    pub fn seal(&self, authenticated: &[u8], plain: &[u8]) -> Result<Vec<u8>> {
        match self {
            Cipher::AesCbc(keys) => {
                let iv: [u8; CBC_IV] = random()?;
                let mut buffer = plain.to_vec();
                { &keys.0 }
                    .less_safe_encrypt(&mut buffer, EncryptionContext::Iv128(iv.into()))
                    .map_err(|_| "AES-CBC: cannot encrypt")?;
                Ok([&iv[..], &buffer].concat())
            }
            Cipher::AesGcm(key) => seal_gcm(key, authenticated, plain),
            Cipher::Secretbox(cipher) => {
                let nonce: [u8; SECRETBOX_NONCE] = random()?;
                let sealed = cipher
                    .encrypt((&nonce).into(), plain)
                    .map_err(|_| "secretbox: cannot encrypt")?;
                Ok([&nonce[..], &sealed].concat())
            }
            Cipher::Seed(seed) => {
                let info: [u8; INFO] = random()?;
                let sealed = seal_gcm(&derive(seed, &info)?, authenticated, plain)?;
                Ok([&info[..], &sealed].concat())
            }
        }
    }
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| "unable to read sufficient random bytes")?;
    Ok(bytes)
}

fn bad_key(error: impl std::fmt::Display) -> String {
    format!("the key cannot be used: {error}")
}

fn split(data: &[u8], at: usize) -> Result<(&[u8], &[u8])> {
    data.split_at_checked(at).ok_or_else(|| TOO_SHORT.to_owned())
}

fn gcm(key: &[u8]) -> Result<LessSafeKey> {
    let algorithm = match key.len() {
        16 => &aead::AES_128_GCM,
        24 => &aead::AES_192_GCM,
        _ => &aead::AES_256_GCM,
    };
    UnboundKey::new(algorithm, key)
        .map(LessSafeKey::new)
        .map_err(bad_key)
}

fn open_gcm(key: &LessSafeKey, authenticated: &[u8], data: &[u8]) -> Result<Vec<u8>> {
    let (nonce, data) = split(data, GCM_NONCE)?;
    let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| TOO_SHORT)?;
    let mut buffer = data.to_vec();
    let plain = key
        .open_in_place(nonce, Aad::from(authenticated), &mut buffer)
        .map_err(|_| "cipher: message authentication failed")?
        .len();
    buffer.truncate(plain);
    Ok(buffer)
}

fn seal_gcm(key: &LessSafeKey, authenticated: &[u8], plain: &[u8]) -> Result<Vec<u8>> {
    let nonce: [u8; GCM_NONCE] = random()?;
    let mut sealed = Vec::with_capacity(GCM_NONCE + plain.len() + key.algorithm().tag_len());
    sealed.extend_from_slice(&nonce);
    sealed.extend_from_slice(plain);
    let tag = key
        .seal_in_place_separate_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(authenticated),
            &mut sealed[GCM_NONCE..],
        )
        .map_err(|_| "AES-GCM: cannot encrypt")?;
    sealed.extend_from_slice(tag.as_ref());
    Ok(sealed)
}

fn derive(seed: &Prk, info: &[u8]) -> Result<LessSafeKey> {
    struct KeyLength;
    impl hkdf::KeyType for KeyLength {
        fn len(&self) -> usize {
            SEED
        }
    }
    let mut key = [0; SEED];
    seed.expand(&[info], KeyLength)
        .and_then(|output| output.fill(&mut key))
        .map_err(|_| "failed to derive a key from the seed")?;
    gcm(&key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_opens() {
        let key = [7; 32];
        for (cipher, bound_to_key) in [
            (Cipher::aes_cbc(&key).unwrap(), false),
            (Cipher::aes_gcm(&key).unwrap(), true),
            (Cipher::secretbox(&key).unwrap(), false),
            (Cipher::seed(&key).unwrap(), true),
        ] {
            for plain in [&b""[..], b"x", &[9; 16], &[3; 4097]] {
                let sealed = cipher.seal(b"/registry/a", plain).unwrap();
                assert_ne!(
                    sealed,
                    cipher.seal(b"/registry/a", plain).unwrap(),
                    "a nonce of its own"
                );
                assert_eq!(cipher.open(b"/registry/a", &sealed).unwrap(), plain);
                assert_eq!(cipher.open(b"/registry/b", &sealed).is_err(), bound_to_key);
                for cut in [0, 5, 16, sealed.len() - 1] {
                    assert!(
                        cipher.open(b"/registry/a", &sealed[..cut]).is_err(),
                        "cut at {cut}"
                    );
                }
            }
        }
    }
}
