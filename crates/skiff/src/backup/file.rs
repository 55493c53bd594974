//! The file of a backup: a head, then frames of at most 64 KiB, the last of which says so.
//!
//! ```text
//! head    magic (16) · format u32 · length u32 · JSON: how the key comes from the passphrase, or that there is none
//! frame   length u32, its highest bit set in the last frame · content · tag
//! ```
//!
//! With a passphrase, content is encrypted by AES-256-GCM: the nonce is the number of the frame, and the head and the
//! frame's length are authenticated with it, so that no frame can be changed, moved, left out or added. Without one, a
//! tag is the SHA-256 of the tag before, the length and the content: that finds damage, not malice. Either way a file
//! that was cut, or in which one bit changed, does not read to its end. Numbers are big-endian.

use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::pbkdf2;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{self, BufReader, Read, Write};
use std::num::NonZeroU32;

const MAGIC: [u8; 16] = *b"skiff backup\0\r\n\x1a";
const FORMAT: u32 = 1;
const FRAME: usize = 64 << 10;
const LAST: u32 = 1 << 31;
const LONGEST_HEAD: u32 = 64 << 10;
const KDF: &str = "pbkdf2-hmac-sha256";
const CIPHER: &str = "aes-256-gcm";
const SALT: usize = 32;
/// OWASP's number for PBKDF2 with HMAC-SHA-256.
pub const ITERATIONS: u32 = 600_000;
/// A file must not be able to keep its reader busy for hours.
const MOST_ITERATIONS: u32 = 20_000_000;

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    encryption: Option<HeadEncryption>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HeadEncryption {
    kdf: String,
    iterations: u32,
    salt: String,
    cipher: String,
}

/// What makes the tags of frames, in order.
enum Seal {
    Digest([u8; 32]),
    Cipher {
        key: Box<LessSafeKey>,
        head: [u8; 32],
        frame: u64,
    },
}

impl Seal {
    fn new(head: &[u8], key: Option<LessSafeKey>) -> Seal {
        let head = Sha256::digest(head).into();
        match key {
            Some(key) => Seal::Cipher {
                key: Box::new(key),
                head,
                frame: 0,
            },
            None => Seal::Digest(head),
        }
    }

    fn tag_length(&self) -> usize {
        match self {
            Seal::Digest(_) => 32,
            Seal::Cipher { .. } => AES_256_GCM.tag_len(),
        }
    }

    /// Encrypts the content, if that is how it is sealed, and makes its tag.
    fn seal(&mut self, length: [u8; 4], content: &mut [u8]) -> io::Result<Vec<u8>> {
        match self {
            Seal::Digest(last) => {
                *last = digest(last, length, content);
                Ok(last.to_vec())
            }
            Seal::Cipher { key, head, frame } => {
                let (nonce, bound) = nonce_and_bound(head, length, *frame);
                *frame += 1;
                let tag = key.seal_in_place_separate_tag(nonce, bound, content);
                let tag = tag.map_err(|_| io::Error::other("the frame cannot be encrypted"))?;
                Ok(tag.as_ref().to_vec())
            }
        }
    }

    /// The content of a frame, which is followed by its tag; `None`: it is not as it was written.
    fn open(&mut self, length: [u8; 4], mut frame_and_tag: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Seal::Digest(last) => {
                let tag = frame_and_tag.split_off(frame_and_tag.len().checked_sub(32)?);
                *last = digest(last, length, &frame_and_tag);
                (last[..] == tag[..]).then_some(frame_and_tag)
            }
            Seal::Cipher { key, head, frame } => {
                let (nonce, bound) = nonce_and_bound(head, length, *frame);
                *frame += 1;
                let plain = key.open_in_place(nonce, bound, &mut frame_and_tag).ok()?.len();
                frame_and_tag.truncate(plain);
                Some(frame_and_tag)
            }
        }
    }
}

fn digest(last: &[u8; 32], length: [u8; 4], content: &[u8]) -> [u8; 32] {
    let mut digest = Sha256::new();
    digest.update(last);
    digest.update(length);
    digest.update(content);
    digest.finalize().into()
}

/// The key is of one file, so that the number of a frame is a nonce.
fn nonce_and_bound(head: &[u8; 32], length: [u8; 4], frame: u64) -> (Nonce, Aad<[u8; 36]>) {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&frame.to_be_bytes());
    let mut bound = [0; 36];
    bound[..32].copy_from_slice(head);
    bound[32..].copy_from_slice(&length);
    (Nonce::assume_unique_for_key(nonce), Aad::from(bound))
}

fn derive(passphrase: &[u8], iterations: u32, salt: &[u8]) -> Result<LessSafeKey> {
    let iterations = NonZeroU32::new(iterations).context("no iterations")?;
    let mut key = [0; 32];
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, salt, passphrase, &mut key);
    let key = UnboundKey::new(&AES_256_GCM, &key).map_err(|_| anyhow::anyhow!("the key cannot be used"))?;
    Ok(LessSafeKey::new(key))
}

/// Writes the frames of a backup. It is whole only after [`Writer::finish`].
pub struct Writer<W: Write> {
    to: W,
    seal: Seal,
    content: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub fn new(to: W, passphrase: Option<&[u8]>) -> Result<Self> {
        Self::with_iterations(to, passphrase, ITERATIONS)
    }

    fn with_iterations(mut to: W, passphrase: Option<&[u8]>, iterations: u32) -> Result<Self> {
        let mut key = None;
        let mut encryption = None;
        if let Some(passphrase) = passphrase {
            let mut salt = [0; SALT];
            aws_lc_rs::rand::fill(&mut salt).map_err(|_| anyhow::anyhow!("no random numbers"))?;
            key = Some(derive(passphrase, iterations, &salt)?);
            encryption = Some(HeadEncryption {
                kdf: KDF.to_owned(),
                iterations,
                salt: STANDARD.encode(salt),
                cipher: CIPHER.to_owned(),
            });
        }
        let json = serde_json::to_vec(&Head { encryption })?;
        let mut head = MAGIC.to_vec();
        head.extend(FORMAT.to_be_bytes());
        head.extend(u32::try_from(json.len())?.to_be_bytes());
        head.extend(json);
        to.write_all(&head)?;
        Ok(Self {
            to,
            seal: Seal::new(&head, key),
            content: Vec::with_capacity(FRAME),
        })
    }

    fn write_frame(&mut self, last: bool) -> io::Result<()> {
        let length = u32::try_from(self.content.len()).map_err(io::Error::other)?;
        let length = (length | if last { LAST } else { 0 }).to_be_bytes();
        let tag = self.seal.seal(length, &mut self.content)?;
        self.to.write_all(&length)?;
        self.to.write_all(&self.content)?;
        self.to.write_all(&tag)?;
        self.content.clear();
        Ok(())
    }

    /// Writes the last frame.
    pub fn finish(mut self) -> io::Result<W> {
        self.write_frame(true)?;
        self.to.flush()?;
        Ok(self.to)
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.content.len() == FRAME {
            self.write_frame(false)?;
        }
        let taken = bytes.len().min(FRAME - self.content.len());
        self.content.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    /// Frames are written when they are full.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the frames of a backup. What it gives is as it was written; whether it is all is known at the end only.
pub struct Reader<R: Read> {
    from: BufReader<R>,
    seal: Seal,
    content: Vec<u8>,
    at: usize,
    frames: u64,
    ended: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the head. The passphrase is asked for if there must be one.
    pub fn open(from: R, passphrase: impl FnOnce() -> Result<Vec<u8>>) -> Result<Self> {
        let mut from = BufReader::new(from);
        let mut head = vec![0; MAGIC.len()];
        if from.read_exact(&mut head).is_err() || head != MAGIC {
            bail!("it is not a backup that skiff made");
        }
        let mut number = || -> Result<u32> {
            let mut bytes = [0; 4];
            from.read_exact(&mut bytes).map_err(|_| cut())?;
            head.extend(bytes);
            Ok(u32::from_be_bytes(bytes))
        };
        let format = number()?;
        if format > FORMAT {
            bail!(
                "it was written by a newer skiff (format {format}, this one knows up to {FORMAT}); use that version"
            );
        }
        ensure!(format == FORMAT, "its head is damaged");
        let length = number()?;
        ensure!(length <= LONGEST_HEAD, "its head is damaged");
        let mut json = vec![0; length as usize];
        from.read_exact(&mut json).map_err(|_| cut())?;
        head.extend(&json);
        let parsed: Head = serde_json::from_slice(&json)
            .ok()
            .context("its head is damaged")?;
        let key = match parsed.encryption {
            None => None,
            Some(encryption) => {
                if encryption.kdf != KDF || encryption.cipher != CIPHER {
                    bail!(
                        "it is encrypted in a way that this skiff does not know ({}, {})",
                        encryption.kdf,
                        encryption.cipher
                    );
                }
                let salt = STANDARD.decode(&encryption.salt).ok();
                let salt = salt.context("its head is damaged")?;
                let sound = (1..=MOST_ITERATIONS).contains(&encryption.iterations);
                ensure!(sound, "its head is damaged");
                Some(derive(&passphrase()?, encryption.iterations, &salt)?)
            }
        };
        Ok(Self {
            from,
            seal: Seal::new(&head, key),
            content: Vec::new(),
            at: 0,
            frames: 0,
            ended: false,
        })
    }

    fn next_frame(&mut self) -> Result<()> {
        let mut length = [0; 4];
        self.from.read_exact(&mut length).map_err(|_| cut())?;
        let number = u32::from_be_bytes(length);
        let size = (number & !LAST) as usize;
        ensure!(size <= FRAME, "{}", self.damaged());
        let mut frame = vec![0; size + self.seal.tag_length()];
        self.from.read_exact(&mut frame).map_err(|_| cut())?;
        let Some(content) = self.seal.open(length, frame) else {
            bail!("{}", self.damaged());
        };
        self.frames += 1;
        (self.content, self.at) = (content, 0);
        self.ended = number & LAST != 0;
        if self.ended {
            let more = self.from.read(&mut [0])?;
            ensure!(more == 0, "it is damaged: something follows its end");
        }
        Ok(())
    }

    fn damaged(&self) -> String {
        match (&self.seal, self.frames) {
            (Seal::Cipher { .. }, 0) => "the passphrase is wrong, or the file is damaged".to_owned(),
            (_, frames) => format!(
                "it is damaged between byte {} and the next {FRAME}",
                frames * FRAME as u64
            ),
        }
    }

    /// Everything must have been read.
    pub fn finish(mut self) -> Result<()> {
        ensure!(
            self.read(&mut [0])? == 0,
            "it is damaged: something follows its end"
        );
        Ok(())
    }
}

fn cut() -> anyhow::Error {
    anyhow::anyhow!("it is damaged: its end is missing")
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while self.at == self.content.len() {
            if self.ended || to.is_empty() {
                return Ok(0);
            }
            self.next_frame().map_err(io::Error::other)?;
        }
        let count = to.len().min(self.content.len() - self.at);
        to[..count].copy_from_slice(&self.content[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &[u8], passphrase: Option<&[u8]>) -> Vec<u8> {
        let mut writer = Writer::with_iterations(Vec::new(), passphrase, 10).unwrap();
        writer.write_all(content).unwrap();
        writer.finish().unwrap()
    }

    fn read(file: &[u8], passphrase: &[u8]) -> Result<Vec<u8>> {
        let mut reader = Reader::open(file, || Ok(passphrase.to_vec()))?;
        let mut content = Vec::new();
        reader.read_to_end(&mut content)?;
        reader.finish()?;
        Ok(content)
    }

    const SEALS: [Option<&[u8]>; 2] = [None, Some(b"open sesame")];

    #[test]
    fn what_was_written_is_read() {
        for passphrase in SEALS {
            for size in [0, 1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME] {
                let content: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
                let file = written(&content, passphrase);
                assert_eq!(read(&file, b"open sesame").unwrap(), content, "{size}");
                let shown = file
                    .windows(100)
                    .any(|part| content.len() > 100 && part == &content[..100]);
                assert_eq!(shown, passphrase.is_none() && size > 100);
            }
        }
        let file = written(b"x", SEALS[1]);
        let error = read(&file, b"open barley").unwrap_err().to_string();
        assert_eq!(error, "the passphrase is wrong, or the file is damaged");
        assert_ne!(file, written(b"x", SEALS[1]), "a key of its own");
    }

    #[test]
    fn every_cut_and_every_changed_bit_is_noticed() {
        for passphrase in SEALS {
            let file = written(b"some content of a backup", passphrase);
            for end in 0..file.len() {
                assert!(read(&file[..end], b"open sesame").is_err(), "cut at {end}");
            }
            for at in 0..file.len() {
                for bit in 0..8 {
                    let mut damaged = file.clone();
                    damaged[at] ^= 1 << bit;
                    assert!(read(&damaged, b"open sesame").is_err(), "bit {bit} of byte {at}");
                }
            }
            let mut longer = file.clone();
            longer.push(0);
            assert!(read(&longer, b"open sesame").is_err());
        }
    }

    #[test]
    fn frames_are_in_order_and_all_there() {
        for passphrase in SEALS {
            let file = written(&[7; 3 * FRAME], passphrase);
            let tag = if passphrase.is_some() { 16 } else { 32 };
            let frame = 4 + FRAME + tag;
            let start = file.len() - 3 * frame;
            let frames: Vec<&[u8]> = file[start..].chunks(frame).collect();
            for order in [&[0, 2][..], &[1, 2], &[1, 0, 2], &[2], &[0, 1], &[0, 0, 1, 2]] {
                let parts = order.iter().flat_map(|&nth| frames[nth]);
                let moved: Vec<u8> = file[..start].iter().chain(parts).copied().collect();
                assert!(read(&moved, b"open sesame").is_err(), "{order:?}");
            }
        }
    }

    #[test]
    fn foreign_and_newer_files_are_named() {
        let check = |file: &[u8], expected: &str| {
            let error = read(file, b"").unwrap_err().to_string();
            assert_eq!(error, expected);
        };
        check(b"", "it is not a backup that skiff made");
        check(
            b"PK\x03\x04 some archive or other",
            "it is not a backup that skiff made",
        );
        let mut newer = written(b"x", None);
        newer[19] = 2;
        check(
            &newer,
            "it was written by a newer skiff (format 2, this one knows up to 1); use that version",
        );
    }
}
