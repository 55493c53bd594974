//! The wire of protobuf: tags, varints, and a buffer that is written from its end to its start, so that
//! a message's length is known when it is put in front of it. Knows no type.

use super::{ProtobufError, Result};

/// How deep groups, which no message of Kubernetes has, may nest before they are refused.
const MAX_GROUPS: usize = 32;

/// The value of one field as it stands on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

impl Wire<'_> {
    pub fn number(self) -> u64 {
        match self {
            Wire::Varint(_) => 0,
            Wire::Fixed64(_) => 1,
            Wire::Bytes(_) => 2,
            Wire::Fixed32(_) => 5,
        }
    }
}

pub(super) fn varint(bytes: &mut &[u8]) -> Result<u64> {
    // Most are one byte: tags, short lengths, flags.
    if let [byte, rest @ ..] = *bytes
        && byte & 0x80 == 0
    {
        *bytes = rest;
        return Ok(u64::from(*byte));
    }
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or(ProtobufError::Truncated)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(ProtobufError::Value("proto: integer overflow".to_owned()))
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8]> {
    if length > i64::MAX as u64 {
        let why = "proto: negative length found during unmarshaling";
        return Err(ProtobufError::Value(why.to_owned()));
    }
    let length = usize::try_from(length).map_err(|_| ProtobufError::Truncated)?;
    let (taken, rest) = bytes.split_at_checked(length).ok_or(ProtobufError::Truncated)?;
    *bytes = rest;
    Ok(taken)
}

fn array<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N]> {
    let (taken, rest) = bytes.split_first_chunk().ok_or(ProtobufError::Truncated)?;
    *bytes = rest;
    Ok(*taken)
}

/// The next field of a message; groups are skipped, as every reader does with what it does not know.
pub(super) fn next_field<'a>(bytes: &mut &'a [u8]) -> Result<Option<(u32, Wire<'a>)>> {
    while !bytes.is_empty() {
        let tag = varint(bytes)?;
        let number = match u32::try_from(tag >> 3) {
            Ok(number) if number > 0 && number <= i32::MAX as u32 => number,
            _ => {
                let (number, wire) = ((tag >> 3) as i32, tag & 7);
                return Err(ProtobufError::Tag { number, wire });
            }
        };
        let wire = match tag & 7 {
            0 => Wire::Varint(varint(bytes)?),
            1 => Wire::Fixed64(u64::from_le_bytes(array(bytes)?)),
            2 => {
                let length = varint(bytes)?;
                Wire::Bytes(take(bytes, length)?)
            }
            3 => {
                skip_group(bytes)?;
                continue;
            }
            4 => return Err(ProtobufError::EndGroup),
            5 => Wire::Fixed32(u32::from_le_bytes(array(bytes)?)),
            other => return Err(ProtobufError::WireType(other)),
        };
        return Ok(Some((number, wire)));
    }
    Ok(None)
}

fn skip_group(bytes: &mut &[u8]) -> Result<()> {
    let mut depth = 1;
    while depth > 0 {
        match varint(bytes)? & 7 {
            0 => drop(varint(bytes)?),
            1 => drop(array::<8>(bytes)?),
            2 => {
                let length = varint(bytes)?;
                take(bytes, length)?;
            }
            3 if depth < MAX_GROUPS => depth += 1,
            3 => return Err(ProtobufError::TooDeep),
            4 => depth -= 1,
            5 => drop(array::<4>(bytes)?),
            other => return Err(ProtobufError::WireType(other)),
        }
    }
    Ok(())
}

/// All fields of a message that only the caller knows.
pub(super) fn fields<'a>(mut bytes: &'a [u8]) -> impl Iterator<Item = Result<(u32, Wire<'a>)>> {
    let mut failed = false;
    std::iter::from_fn(move || {
        if failed {
            return None;
        }
        let next = next_field(&mut bytes).transpose();
        failed = matches!(next, Some(Err(_)));
        next
    })
}

/// A buffer that grows at its front.
pub(super) struct Back {
    bytes: Vec<u8>,
    start: usize,
}

impl Back {
    pub fn with_capacity(capacity: usize) -> Back {
        Back {
            bytes: vec![0; capacity.max(64)],
            start: capacity.max(64),
        }
    }

    /// How much has been written: a mark for [`Back::close`].
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    fn room(&mut self, count: usize) {
        if self.start >= count {
            return;
        }
        let written = self.len();
        let size = (self.bytes.len() * 2).max(written + count);
        let mut bytes = vec![0; size];
        bytes[size - written..].copy_from_slice(&self.bytes[self.start..]);
        self.start = size - written;
        self.bytes = bytes;
    }

    pub fn put(&mut self, bytes: &[u8]) {
        self.room(bytes.len());
        self.start -= bytes.len();
        self.bytes[self.start..self.start + bytes.len()].copy_from_slice(bytes);
    }

    pub fn varint(&mut self, mut value: u64) {
        if value < 0x80 {
            self.room(1);
            self.start -= 1;
            self.bytes[self.start] = value as u8;
            return;
        }
        let (mut out, mut count) = ([0u8; 10], 0);
        while value >= 0x80 {
            out[count] = value as u8 | 0x80;
            value >>= 7;
            count += 1;
        }
        out[count] = value as u8;
        self.put(&out[..=count]);
    }

    fn tag(&mut self, number: u32, wire: u64) {
        self.varint(u64::from(number) << 3 | wire);
    }

    pub fn field_varint(&mut self, number: u32, value: u64) {
        self.varint(value);
        self.tag(number, 0);
    }

    pub fn field_double(&mut self, number: u32, value: f64) {
        self.put(&value.to_le_bytes());
        self.tag(number, 1);
    }

    pub fn field_bytes(&mut self, number: u32, bytes: &[u8]) {
        self.put(bytes);
        self.varint(bytes.len() as u64);
        self.tag(number, 2);
    }

    /// Makes what was written since `mark` the value of a field.
    pub fn close(&mut self, number: u32, mark: usize) {
        self.varint((self.len() - mark) as u64);
        self.tag(number, 2);
    }

    pub fn written(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub fn into_vec(self) -> Vec<u8> {
        self.written().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_reads_back() {
        let mut out = Back::with_capacity(0);
        for (number, value) in [(1, u64::MAX), (2, 300), (3, 0), (2000, 127)] {
            let mark = out.len();
            out.field_bytes(7, &vec![9; value as usize % 400]);
            out.field_varint(1, value);
            out.close(number, mark);
        }
        let bytes = out.into_vec();
        let mut numbers = Vec::new();
        for field in fields(&bytes) {
            let (number, wire) = field.expect("a field");
            let Wire::Bytes(inner) = wire else {
                panic!("{wire:?}")
            };
            let inner: Vec<_> = fields(inner).collect::<Result<_>>().expect("fields");
            let (1, Wire::Varint(value)) = inner[0] else {
                panic!("{inner:?}")
            };
            assert_eq!(inner[1], (7, Wire::Bytes(&vec![9; value as usize % 400])));
            numbers.push((number, value));
        }
        assert_eq!(numbers, [(2000, 127), (3, 0), (2, 300), (1, u64::MAX)]);
    }

    #[test]
    fn groups_are_skipped_and_bounded() {
        let check = |bytes: &[u8], expected: &str| {
            let got: Result<Vec<_>> = fields(bytes).collect();
            let got = got.map_or_else(|error| error.to_string(), |fields| format!("{}", fields.len()));
            assert_eq!(got, expected, "{bytes:?}");
        };
        check(&[0x0b, 0x08, 1, 0x0c, 0x08, 1], "1");
        check(&[0x0b; 100], "proto: message nests too deep");
        check(&[0x0b, 0x08], "unexpected EOF");
        check(&[0x0c], "proto: wiretype end group for non-group");
        check(&[0x00], "proto: illegal tag 0 (wire type 0)");
        check(&[0xff; 11], "proto: integer overflow");
    }
}
