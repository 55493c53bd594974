//! A layer's bytes, decompressed, with the digest of what came in and of what went out.

use super::limits::Limited;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

/// Tells gzip, zstd and plain by their first bytes: media types are not to be trusted for this.
pub fn decompress<'a>(reader: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut reader = BufReader::with_capacity(128 * 1024, reader);
    let start = reader.fill_buf()?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(reader))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::stream::read::Decoder::with_buffer(reader)?)
    } else {
        Box::new(reader)
    })
}

struct Hashing<R> {
    inner: R,
    hash: Rc<RefCell<Sha256>>,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hash.borrow_mut().update(&buffer[..length]);
        Ok(length)
    }
}

pub struct Verified {
    plain: Hashing<Limited<Box<dyn Read>>>,
    raw: Rc<RefCell<Sha256>>,
}

impl Verified {
    /// `limit` is for the decompressed bytes: a small file can hold any amount of them.
    pub fn open(path: &Path, limit: u64) -> io::Result<Verified> {
        let raw = Rc::new(RefCell::new(Sha256::new()));
        let file = Hashing {
            inner: File::open(path)?,
            hash: raw.clone(),
        };
        let plain = Hashing {
            inner: Limited {
                inner: decompress(file)?,
                left: limit,
                error: "the layer is too large when it is decompressed",
            },
            hash: Rc::default(),
        };
        Ok(Verified { plain, raw })
    }

    /// Reads what the tar reader left (padding) and returns the digests of both sides. Bytes after the
    /// compressed stream's end are in neither and so break the outer digest, as they should.
    pub fn finish(mut self) -> io::Result<(String, String)> {
        io::copy(&mut self.plain, &mut io::sink())?;
        let text =
            |hash: &Rc<RefCell<Sha256>>| format!("sha256:{}", super::hex(&hash.borrow().clone().finalize()));
        Ok((text(&self.raw), text(&self.plain.hash)))
    }
}

impl Read for Verified {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.plain.read(buffer)
    }
}
