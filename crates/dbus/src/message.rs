//! A message and its bytes. Pure: what is read may come from anybody on the bus.

use std::os::fd::OwnedFd;

use crate::Error;

/// The protocol allows 128 MiB; nothing that skiff asks for comes near this.
pub(crate) const MAX_MESSAGE: usize = 1 << 17;
pub(crate) const FIXED_HEADER: usize = 16;
const VERSION: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Call,
    Return,
    Error,
    Signal,
    /// To be ignored.
    Other,
}

#[derive(Debug)]
pub struct Message {
    pub kind: Kind,
    /// Given by the connection that sends it.
    pub serial: u32,
    pub path: Option<String>,
    pub interface: Option<String>,
    pub member: Option<String>,
    pub error_name: Option<String>,
    pub reply_serial: Option<u32>,
    pub destination: Option<String>,
    pub sender: Option<String>,
    pub body: Body,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    fn new(kind: Kind) -> Self {
        Message {
            kind,
            serial: 0,
            path: None,
            interface: None,
            member: None,
            error_name: None,
            reply_serial: None,
            destination: None,
            sender: None,
            body: Body::default(),
            fds: Vec::new(),
        }
    }

    pub fn call(destination: &str, path: &str, interface: &str, member: &str, body: Body) -> Self {
        Message {
            destination: Some(destination.to_owned()),
            path: Some(path.to_owned()),
            interface: Some(interface.to_owned()),
            member: Some(member.to_owned()),
            body,
            ..Message::new(Kind::Call)
        }
    }

    pub fn signal(path: &str, interface: &str, member: &str, body: Body) -> Self {
        Message {
            path: Some(path.to_owned()),
            interface: Some(interface.to_owned()),
            member: Some(member.to_owned()),
            body,
            ..Message::new(Kind::Signal)
        }
    }

    pub fn reply(&self, body: Body) -> Self {
        Message {
            reply_serial: Some(self.serial),
            destination: self.sender.clone(),
            body,
            ..Message::new(Kind::Return)
        }
    }

    pub fn is(&self, interface: &str, member: &str) -> bool {
        self.interface.as_deref() == Some(interface) && self.member.as_deref() == Some(member)
    }

    pub fn read(&self) -> Reader<'_> {
        Reader {
            bytes: &self.body.bytes,
            place: 0,
            big_endian: self.body.big_endian,
        }
    }
}

/// The values of a message, in the order of its signature.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Body {
    signature: String,
    bytes: Vec<u8>,
    /// Of what was received; what is sent is little-endian.
    big_endian: bool,
}

impl Body {
    pub fn signature(&self) -> &str {
        &self.signature
    }

    pub fn string(mut self, text: &str) -> Self {
        self.signature.push('s');
        put_string(&mut self.bytes, text);
        self
    }

    pub fn int(mut self, number: i32) -> Self {
        self.signature.push('i');
        put_u32(&mut self.bytes, number.cast_unsigned());
        self
    }

    pub fn uint(mut self, number: u32) -> Self {
        self.signature.push('u');
        put_u32(&mut self.bytes, number);
        self
    }

    pub fn bool(mut self, value: bool) -> Self {
        self.signature.push('b');
        put_u32(&mut self.bytes, u32::from(value));
        self
    }

    /// The file descriptor at this place of the message's list.
    pub fn fd(mut self, place: u32) -> Self {
        self.signature.push('h');
        put_u32(&mut self.bytes, place);
        self
    }

    pub fn variant_bool(mut self, value: bool) -> Self {
        self.signature.push('v');
        put_signature(&mut self.bytes, "b");
        put_u32(&mut self.bytes, u32::from(value));
        self
    }

    /// A variant with an unsigned number of 64 bits.
    pub fn variant_u64(mut self, number: u64) -> Self {
        self.signature.push('v');
        put_signature(&mut self.bytes, "t");
        align(&mut self.bytes, 8);
        self.bytes.extend(number.to_le_bytes());
        self
    }
}

fn align(bytes: &mut Vec<u8>, to: usize) {
    bytes.resize(bytes.len().next_multiple_of(to), 0);
}

fn put_u32(bytes: &mut Vec<u8>, number: u32) {
    align(bytes, 4);
    bytes.extend(number.to_le_bytes());
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    put_u32(bytes, u32::try_from(text.len()).unwrap_or(u32::MAX));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

/// One of this crate's own, so it is short.
fn put_signature(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

mod field {
    pub(super) const PATH: u8 = 1;
    pub(super) const INTERFACE: u8 = 2;
    pub(super) const MEMBER: u8 = 3;
    pub(super) const ERROR_NAME: u8 = 4;
    pub(super) const REPLY_SERIAL: u8 = 5;
    pub(super) const DESTINATION: u8 = 6;
    pub(super) const SENDER: u8 = 7;
    pub(super) const SIGNATURE: u8 = 8;
    pub(super) const UNIX_FDS: u8 = 9;
}

pub(crate) fn encode(message: &Message) -> Vec<u8> {
    let mut fields = Vec::new();
    let mut field = |code: u8, signature: &str, put: &dyn Fn(&mut Vec<u8>)| {
        align(&mut fields, 8);
        fields.push(code);
        put_signature(&mut fields, signature);
        put(&mut fields);
    };
    for (code, signature, text) in [
        (field::PATH, "o", &message.path),
        (field::INTERFACE, "s", &message.interface),
        (field::MEMBER, "s", &message.member),
        (field::ERROR_NAME, "s", &message.error_name),
        (field::DESTINATION, "s", &message.destination),
    ] {
        if let Some(text) = text {
            field(code, signature, &|bytes| put_string(bytes, text));
        }
    }
    if let Some(serial) = message.reply_serial {
        field(field::REPLY_SERIAL, "u", &|bytes| put_u32(bytes, serial));
    }
    if !message.body.signature.is_empty() {
        field(field::SIGNATURE, "g", &|bytes| {
            put_signature(bytes, &message.body.signature);
        });
    }
    if !message.fds.is_empty() {
        let count = u32::try_from(message.fds.len()).unwrap_or(u32::MAX);
        field(field::UNIX_FDS, "u", &|bytes| put_u32(bytes, count));
    }
    let kind = match message.kind {
        Kind::Call => 1,
        Kind::Return => 2,
        Kind::Error => 3,
        Kind::Signal | Kind::Other => 4,
    };
    let mut bytes = vec![b'l', kind, 0, VERSION];
    put_u32(
        &mut bytes,
        u32::try_from(message.body.bytes.len()).unwrap_or(u32::MAX),
    );
    put_u32(&mut bytes, message.serial);
    put_u32(&mut bytes, u32::try_from(fields.len()).unwrap_or(u32::MAX));
    bytes.extend(fields);
    align(&mut bytes, 8);
    bytes.extend(&message.body.bytes);
    bytes
}

/// How long the whole message is, by its first [`FIXED_HEADER`] bytes.
pub(crate) fn length(header: &[u8]) -> Result<usize, Error> {
    let (body, fields) = lengths(header)?;
    Ok((FIXED_HEADER + fields).next_multiple_of(8) + body)
}

fn lengths(header: &[u8]) -> Result<(usize, usize), Error> {
    let big_endian = match header.first() {
        Some(b'l') => false,
        Some(b'B') => true,
        _ => return Err(Error::Malformed("neither byte order")),
    };
    if header.get(3) != Some(&VERSION) {
        return Err(Error::Malformed("another version of the protocol"));
    }
    let number = |place: usize| -> Result<usize, Error> {
        let number = Reader {
            bytes: header,
            place,
            big_endian,
        }
        .u32()?;
        usize::try_from(number).map_err(|_| Error::Malformed("too long"))
    };
    let (body, fields) = (number(4)?, number(12)?);
    if body.saturating_add(fields) > MAX_MESSAGE {
        return Err(Error::Malformed("too long"));
    }
    Ok((body, fields))
}

/// `fds` are those that came with the message.
pub(crate) fn decode(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Message, Error> {
    let (body, fields) = lengths(bytes)?;
    let big_endian = bytes.first() == Some(&b'B');
    let start = (FIXED_HEADER + fields).next_multiple_of(8);
    if bytes.len() != start + body {
        return Err(Error::Malformed("another length than it says"));
    }
    let kind = match bytes.get(1) {
        Some(1) => Kind::Call,
        Some(2) => Kind::Return,
        Some(3) => Kind::Error,
        Some(4) => Kind::Signal,
        _ => Kind::Other,
    };
    let mut message = Message {
        fds,
        ..Message::new(kind)
    };
    let mut reader = Reader {
        bytes,
        place: 8,
        big_endian,
    };
    message.serial = reader.u32()?;
    // Fields start at a multiple of eight of the message, and so do they of what is read here.
    let mut reader = Reader {
        bytes: bytes.get(..FIXED_HEADER + fields).unwrap_or_default(),
        place: FIXED_HEADER,
        big_endian,
    };
    while reader.place < reader.bytes.len() {
        reader.align(8);
        let code = reader.byte()?;
        let signature = reader.signature()?.to_owned();
        let (mut text, mut number) = (None, None);
        match signature.as_str() {
            "s" | "o" => text = Some(reader.string()?.to_owned()),
            "g" => text = Some(reader.signature()?.to_owned()),
            "u" => number = Some(reader.u32()?),
            _ => return Err(Error::Malformed("a header field of an unknown type")),
        }
        match code {
            field::PATH => message.path = text,
            field::INTERFACE => message.interface = text,
            field::MEMBER => message.member = text,
            field::ERROR_NAME => message.error_name = text,
            field::DESTINATION => message.destination = text,
            field::SENDER => message.sender = text,
            field::REPLY_SERIAL => message.reply_serial = number,
            field::SIGNATURE => message.body.signature = text.unwrap_or_default(),
            _ => {}
        }
    }
    message.body.bytes = bytes.get(start..).unwrap_or_default().to_vec();
    message.body.big_endian = big_endian;
    Ok(message)
}

/// How many file descriptors belong to the message, by its header.
pub(crate) fn fd_count(bytes: &[u8]) -> Result<usize, Error> {
    let (_, fields) = lengths(bytes)?;
    let mut reader = Reader {
        bytes: bytes.get(..FIXED_HEADER + fields).unwrap_or_default(),
        place: FIXED_HEADER,
        big_endian: bytes.first() == Some(&b'B'),
    };
    while reader.place < reader.bytes.len() {
        reader.align(8);
        let code = reader.byte()?;
        match reader.signature()? {
            "s" | "o" => drop(reader.string()?),
            "g" => drop(reader.signature()?),
            "u" => {
                let number = reader.u32()?;
                if code == field::UNIX_FDS {
                    return usize::try_from(number).map_err(|_| Error::Malformed("too many descriptors"));
                }
            }
            _ => return Err(Error::Malformed("a header field of an unknown type")),
        }
    }
    Ok(0)
}

/// Reads values in the order in which they were written.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    place: usize,
    big_endian: bool,
}

impl<'a> Reader<'a> {
    fn align(&mut self, to: usize) {
        self.place = self.place.next_multiple_of(to);
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Error> {
        let rest = self.bytes.get(self.place..).unwrap_or_default();
        let taken = rest.get(..count).ok_or(Error::Malformed("it ends too early"))?;
        self.place += count;
        Ok(taken)
    }

    pub fn byte(&mut self) -> Result<u8, Error> {
        Ok(self.take(1)?.first().copied().unwrap_or_default())
    }

    pub fn u32(&mut self) -> Result<u32, Error> {
        self.align(4);
        let bytes = self.take(4)?.try_into().unwrap_or_default();
        Ok(if self.big_endian {
            u32::from_be_bytes(bytes)
        } else {
            u32::from_le_bytes(bytes)
        })
    }

    pub fn i32(&mut self) -> Result<i32, Error> {
        Ok(self.u32()?.cast_signed())
    }

    pub fn u64(&mut self) -> Result<u64, Error> {
        self.align(8);
        let bytes = self.take(8)?.try_into().unwrap_or_default();
        Ok(if self.big_endian {
            u64::from_be_bytes(bytes)
        } else {
            u64::from_le_bytes(bytes)
        })
    }

    pub fn bool(&mut self) -> Result<bool, Error> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::Malformed("a boolean that is neither")),
        }
    }

    pub fn string(&mut self) -> Result<&'a str, Error> {
        let length = usize::try_from(self.u32()?).map_err(|_| Error::Malformed("too long"))?;
        self.text(length)
    }

    pub fn signature(&mut self) -> Result<&'a str, Error> {
        let length = usize::from(self.byte()?);
        self.text(length)
    }

    fn text(&mut self, length: usize) -> Result<&'a str, Error> {
        let bytes = self.take(length)?;
        if self.byte()? != 0 {
            return Err(Error::Malformed("a string without an end"));
        }
        std::str::from_utf8(bytes).map_err(|_| Error::Malformed("a string that is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_can_be_read() {
        let body = Body::default()
            .string("a")
            .bool(true)
            .int(-1)
            .variant_u64(7)
            .variant_bool(true);
        let mut call = Message::call("org.a", "/b", "org.c", "D", body);
        call.serial = 3;
        let bytes = encode(&call);
        assert_eq!(length(&bytes[..FIXED_HEADER]).unwrap(), bytes.len());
        let read = decode(&bytes, Vec::new()).unwrap();
        assert_eq!((read.kind, read.serial), (Kind::Call, 3));
        assert_eq!(read.path.as_deref(), Some("/b"));
        assert!(read.is("org.c", "D"));
        assert_eq!(read.body.signature(), "sbivv");
        let mut values = read.read();
        assert_eq!(values.string().unwrap(), "a");
        assert!(values.bool().unwrap());
        assert_eq!(values.i32().unwrap(), -1);
        assert_eq!(values.signature().unwrap(), "t");
        assert_eq!(values.u64().unwrap(), 7);
        assert_eq!(values.signature().unwrap(), "b");
        assert!(values.bool().unwrap());
        assert!(values.u32().is_err(), "there is no more");
    }

    /// As the specification writes it out: a call of Hello, by hand.
    #[test]
    fn a_known_message() {
        let hello = Message {
            serial: 1,
            ..Message::call(
                "org.freedesktop.DBus",
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "Hello",
                Body::default(),
            )
        };
        let bytes = encode(&hello);
        assert_eq!(
            &bytes[..16],
            b"l\x01\x00\x01\x00\x00\x00\x00\x01\x00\x00\x00\x6d\x00\x00\x00"
        );
        assert_eq!(&bytes[16..24], b"\x01\x01o\x00\x15\x00\x00\x00");
        assert_eq!(&bytes[24..48], b"/org/freedesktop/DBus\x00\x00\x00");
        assert_eq!(bytes.len() % 8, 0);
    }

    #[test]
    fn what_cannot_be_a_message_is_refused() {
        let good = encode(&Message::call("a", "/", "b", "C", Body::default().string("text")));
        for cut in 0..good.len() {
            assert!(decode(&good[..cut], Vec::new()).is_err(), "{cut}");
        }
        for place in 0..good.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bad = good.clone();
                bad[place] = value;
                // It may be another message, but it must not panic.
                let _ = decode(&bad, Vec::new()).map(|message| message.read().string().map(str::len));
                let _ = fd_count(&bad);
            }
        }
        let mut long = good.clone();
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(length(&long), Err(Error::Malformed("too long"))));
    }
}
