//! Header blocks: name and value pairs behind one zlib stream a direction, primed with a dictionary
//! that the protocol defines.

use std::io;
use std::sync::LazyLock;

use flate2::{Decompress, FlushDecompress, Status};

/// A block that unpacks to more is an attack.
const MAX_UNPACKED: usize = 64 * 1024;

/// The dictionary: these words with their lengths, then the text.
static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    const WORDS: &str = "options,head,post,put,delete,trace,accept,accept-charset,accept-encoding,accept-language,\
        accept-ranges,age,allow,authorization,cache-control,connection,content-base,content-encoding,\
        content-language,content-length,content-location,content-md5,content-range,content-type,date,etag,expect,\
        expires,from,host,if-match,if-modified-since,if-none-match,if-range,if-unmodified-since,last-modified,\
        location,max-forwards,pragma,proxy-authenticate,proxy-authorization,range,referer,retry-after,server,te,\
        trailer,transfer-encoding,upgrade,user-agent,vary,via,warning,www-authenticate,method,get,status,200 OK,\
        version,HTTP/1.1,url,public,set-cookie,keep-alive,origin";
    const TEXT: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505\
        203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized\
        403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable\
        Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT\
        chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,\
        text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";
    let mut dictionary = Vec::with_capacity(1423);
    for word in WORDS.split(',') {
        dictionary.extend((word.len() as u32).to_be_bytes());
        dictionary.extend(word.as_bytes());
    }
    dictionary.extend(TEXT.as_bytes());
    dictionary
});

/// The headers of one stream. Names are in lower case, as they are on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Headers(Vec<(String, String)>);

impl Headers {
    /// The value of a header, by a name in lower case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(have, _)| have == name)
            .map(|(_, value)| value.as_str())
    }

    fn parse(mut block: &[u8]) -> io::Result<Headers> {
        let count = take_u32(&mut block)?;
        let mut headers = Vec::new();
        for _ in 0..count {
            let name = take_string(&mut block)?.to_ascii_lowercase();
            let value = take_string(&mut block)?;
            headers.push((name, value));
        }
        Ok(Headers(headers))
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

fn take_u32(block: &mut &[u8]) -> io::Result<u32> {
    let (number, rest) = block
        .split_first_chunk::<4>()
        .ok_or_else(|| malformed("header block is cut short"))?;
    *block = rest;
    Ok(u32::from_be_bytes(*number))
}

fn take_string(block: &mut &[u8]) -> io::Result<String> {
    let length = take_u32(block)? as usize;
    let (text, rest) = block
        .split_at_checked(length)
        .ok_or_else(|| malformed("header block is cut short"))?;
    *block = rest;
    String::from_utf8(text.to_vec()).map_err(|_| malformed("header is not UTF-8"))
}

/// Unpacks the blocks of one direction, in their order.
pub(super) struct Unpacker(Decompress);

impl Unpacker {
    pub fn new() -> Unpacker {
        Unpacker(Decompress::new(true))
    }

    pub fn unpack(&mut self, mut packed: &[u8]) -> io::Result<Headers> {
        let mut block = Vec::new();
        let mut buffer = [0; 4096];
        while !packed.is_empty() {
            let (read, written) = (self.0.total_in(), self.0.total_out());
            let status = self.0.decompress(packed, &mut buffer, FlushDecompress::Sync);
            let read = (self.0.total_in() - read) as usize;
            let written = (self.0.total_out() - written) as usize;
            packed = packed.get(read..).unwrap_or_default();
            block.extend_from_slice(&buffer[..written]);
            match status {
                Ok(Status::StreamEnd) => return Err(malformed("header stream ended")),
                Ok(_) if read == 0 && written == 0 => return Err(malformed("header block does not unpack")),
                Ok(_) => {}
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0
                        .set_dictionary(&DICTIONARY)
                        .map_err(|_| malformed("header block wants another dictionary"))?;
                }
                Err(_) => return Err(malformed("header block does not unpack")),
            }
            if block.len() > MAX_UNPACKED {
                return Err(malformed("header block is too large"));
            }
        }
        // What is still inside the decompressor when the input is used up.
        loop {
            let written = self.0.total_out();
            let status = self.0.decompress(&[], &mut buffer, FlushDecompress::Sync);
            let written = (self.0.total_out() - written) as usize;
            block.extend_from_slice(&buffer[..written]);
            if written == 0 || status.is_err() || block.len() > MAX_UNPACKED {
                break;
            }
        }
        if block.len() > MAX_UNPACKED {
            return Err(malformed("header block is too large"));
        }
        Headers::parse(&block)
    }
}

/// Packs the blocks of one direction. Our headers are few and short: they go uncompressed, as stored
/// blocks of a zlib stream without a dictionary, which every inflater reads.
#[derive(Default)]
pub(super) struct Packer {
    started: bool,
}

impl Packer {
    pub fn pack(&mut self, headers: &[(&str, &str)]) -> Vec<u8> {
        let mut block = (headers.len() as u32).to_be_bytes().to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            block.extend((text.len() as u32).to_be_bytes());
            block.extend(text.as_bytes());
        }
        let mut packed = Vec::with_capacity(block.len() + 8);
        if !self.started {
            self.started = true;
            packed.extend([0x78, 0x01]);
        }
        for piece in block.chunks(usize::from(u16::MAX)) {
            let length = piece.len() as u16;
            packed.push(0);
            packed.extend(length.to_le_bytes());
            packed.extend((!length).to_le_bytes());
            packed.extend_from_slice(piece);
        }
        // COMPAT: Go's inflater holds a stored block back until the next block begins; an empty one,
        // which is how zlib marks a flush, makes it hand everything out.
        packed.extend([0, 0, 0, 0xff, 0xff]);
        packed
    }
}

/// What a client does: deflate with the dictionary. For tests, which are clients.
#[cfg(test)]
pub(crate) mod client {
    use super::*;

    pub(crate) struct ClientPacker(flate2::Compress);

    impl ClientPacker {
        pub fn new() -> ClientPacker {
            let mut compress = flate2::Compress::new(flate2::Compression::best(), true);
            compress.set_dictionary(&DICTIONARY).unwrap();
            ClientPacker(compress)
        }

        pub fn pack(&mut self, headers: &[(&str, &str)]) -> Vec<u8> {
            let mut block = (headers.len() as u32).to_be_bytes().to_vec();
            for text in headers.iter().flat_map(|(name, value)| [name, value]) {
                block.extend((text.len() as u32).to_be_bytes());
                block.extend(text.as_bytes());
            }
            let mut packed = Vec::with_capacity(block.len() + 1024);
            self.0
                .compress_vec(&block, &mut packed, flate2::FlushCompress::Sync)
                .unwrap();
            packed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_is_the_protocols() {
        let adler = DICTIONARY.iter().fold((1u32, 0u32), |(a, b), byte| {
            ((a + u32::from(*byte)) % 65521, (a + b + u32::from(*byte)) % 65521)
        });
        assert_eq!((DICTIONARY.len(), (adler.1 << 16) | adler.0), (1423, 0xe3c6_a7c2));
    }

    #[test]
    fn blocks_share_one_stream() {
        let mut client = client::ClientPacker::new();
        let mut unpacker = Unpacker::new();
        for kind in ["error", "stdin", "stdout"] {
            let block = client.pack(&[("streamtype", kind), ("accept-encoding", "gzip")]);
            assert_eq!(unpacker.unpack(&block).unwrap().get("streamtype"), Some(kind));
        }
        // Ours, read back by an inflater that was told nothing.
        let (mut packer, mut unpacker) = (Packer::default(), Unpacker::new());
        assert_eq!(unpacker.unpack(&packer.pack(&[])).unwrap(), Headers::default());
        assert_eq!(
            unpacker.unpack(&packer.pack(&[("a", "b")])).unwrap().get("a"),
            Some("b")
        );
    }

    #[test]
    fn bad_blocks() {
        assert!(Unpacker::new().unpack(b"not zlib").is_err());
        assert!(Unpacker::new().unpack(&[]).is_err());
        let bomb = client::ClientPacker::new().pack(&[("a", "x".repeat(1 << 20).as_str())]);
        assert!(Unpacker::new().unpack(&bomb).is_err());
        assert!(Headers::parse(&[0xff, 0xff, 0xff, 0xff]).is_err());
        assert!(Headers::parse(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff, 0]).is_err());
    }
}
