//! The record of the allocated node ports: upstream's, under upstream's key, so that its API servers can share it. One bit
//! a port, as the bytes of one large number; it is changed by compare-and-swap only.

use std::ops::RangeInclusive;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use skiff_api::facts;
use skiff_meta::Status;
use skiff_store::{Merge, Merged};

use crate::{Codec, Registry, errors, object};

pub(super) const KEY: &str = "/registry/ranges/servicenodeports";
const KIND: &str = "RangeAllocation";

static CODEC: LazyLock<Codec> = LazyLock::new(|| match facts::schema().by_gvk("", "v1", KIND) {
    Some(id) => Codec::typed("v1", KIND, id, true),
    None => Codec::json("v1", KIND),
});

#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum PortError {
    #[error("provided port is already allocated")]
    Allocated,
    #[error("provided port is not in the valid range. The range of valid ports is {0}")]
    NotInRange(String),
    #[error("range is full")]
    Full,
    #[error("cannot allocate resources of type servicenodeportallocations at this time")]
    NoRecord,
    #[error("the provided range does not match the current range")]
    OtherRange,
}

/// The range of this server's flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortRange(RangeInclusive<u16>);

impl PortRange {
    pub fn new(range: RangeInclusive<u16>) -> PortRange {
        PortRange(range)
    }

    pub fn parse(text: &str) -> Option<PortRange> {
        let (first, last) = text.split_once('-')?;
        Some(PortRange(first.parse().ok()?..=last.parse().ok()?))
    }

    pub fn contains(&self, port: u16) -> bool {
        self.0.contains(&port)
    }

    pub fn ports(&self) -> RangeInclusive<u16> {
        self.0.clone()
    }

    fn place(&self, port: u16) -> Option<usize> {
        self.contains(port).then(|| usize::from(port - self.0.start()))
    }

    /// The ports in the order in which they are tried: the lower part is left to those who choose their port themselves,
    /// as long as there are others.
    pub fn candidates(&self) -> impl Iterator<Item = u16> + use<> {
        let (first, size) = (*self.0.start(), self.0.len());
        // COMPAT: upstream's numbers.
        let lower = if size <= 16 { 0 } else { (size / 32).clamp(16, 128) };
        [(lower, size - lower), (0, lower)]
            .into_iter()
            .filter(|(_, size)| *size > 0)
            .flat_map(move |(offset, size)| {
                let start = rand::random_range(0..size);
                (0..size).map(move |step| first + (offset + (start + step) % size) as u16)
            })
    }

    /// Takes and frees ports in the record that is there; refused if one of them is taken by then.
    pub fn merge(&self, take: Vec<u16>, free: Vec<u16>) -> Merge {
        let range = self.clone();
        Merge::new(move |current| {
            let otherwise = if take.is_empty() {
                Merged::Keep
            } else {
                Merged::Refuse
            };
            let Some(Ok(mut record)) = current.map(Record::read) else {
                return otherwise;
            };
            if record.range != range {
                return otherwise;
            }
            if !take.iter().all(|port| record.take(*port)) {
                return Merged::Refuse;
            }
            let freed = free.iter().filter(|port| record.free(**port)).count();
            if take.is_empty() && freed == 0 {
                return Merged::Keep;
            }
            record.encode().map_or(otherwise, Merged::Put)
        })
    }
}

impl std::fmt::Display for PortRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0.start(), self.0.end())
    }
}

pub(super) struct Record {
    /// As it was read: others' metadata stay.
    object: Value,
    pub range: PortRange,
    /// The lowest bit of the first byte is the first port.
    bits: Vec<u8>,
}

impl Record {
    pub fn empty(range: &PortRange) -> Record {
        Record {
            object: json!({"kind": KIND, "apiVersion": "v1"}),
            range: range.clone(),
            bits: Vec::new(),
        }
    }

    pub fn read(value: &[u8]) -> Result<Record, String> {
        let object = CODEC.decode(value).map_err(|status| status.message)?;
        let text = object::at_str(&object, &["range"]);
        let range = PortRange::parse(text).ok_or_else(|| format!("not a range of ports: {text:?}"))?;
        let data = object::at_str(&object, &["data"]);
        let mut bits = STANDARD.decode(data).map_err(|error| error.to_string())?;
        bits.reverse();
        Ok(Record { object, range, bits })
    }

    pub fn encode(&self) -> Option<Bytes> {
        let mut object = self.object.clone();
        let mut bits = self.bits.clone();
        while bits.last() == Some(&0) {
            bits.pop();
        }
        bits.reverse();
        object::put(&mut object, &["range"], json!(self.range.to_string()));
        object::put(&mut object, &["data"], json!(STANDARD.encode(bits)));
        CODEC.encode(&object).ok()
    }

    /// The record of the store, which must be of the range of this server.
    pub async fn of(registry: &Registry, range: &PortRange) -> Result<Result<Record, PortError>, Status> {
        let (found, _) = registry.store.get(KEY).await.map_err(errors::store)?;
        let Some(found) = found else {
            return Ok(Err(PortError::NoRecord));
        };
        let record = Record::read(&found.value)
            .map_err(|error| Status::internal(format_args!("the record of node ports: {error}")))?;
        Ok(if record.range == *range {
            Ok(record)
        } else {
            Err(PortError::OtherRange)
        })
    }

    pub fn has(&self, port: u16) -> bool {
        let place = self.range.place(port);
        place.is_some_and(|place| self.bits.get(place / 8).copied().unwrap_or(0) & (1 << (place % 8)) != 0)
    }

    /// False if it is taken, or not of the range.
    pub fn take(&mut self, port: u16) -> bool {
        let Some(place) = self.range.place(port).filter(|_| !self.has(port)) else {
            return false;
        };
        if self.bits.len() <= place / 8 {
            self.bits.resize(place / 8 + 1, 0);
        }
        self.bits[place / 8] |= 1 << (place % 8);
        true
    }

    /// False if it was free.
    pub fn free(&mut self, port: u16) -> bool {
        let Some(place) = self.range.place(port).filter(|_| self.has(port)) else {
            return false;
        };
        self.bits[place / 8] &= !(1 << (place % 8));
        true
    }

    pub fn taken(&self) -> impl Iterator<Item = u16> {
        self.range.ports().filter(|port| self.has(*port))
    }

    /// The same metadata with another content.
    pub fn replaced(&self, with: Record) -> Record {
        Record {
            object: self.object.clone(),
            ..with
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_record_is_upstreams() {
        let range = PortRange::new(30000..=32767);
        let mut record = Record::empty(&range);
        for port in [30000, 30009, 31234] {
            assert!(record.take(port));
            assert!(!record.take(port));
        }
        assert!(!record.take(29999));
        let bytes = record.encode().expect("encodes");
        // The envelope, then `range` and `data` of the message.
        assert!(bytes.starts_with(b"k8s\0"));
        let text = b"\x12\x0b30000-32767\x1a";
        let at = bytes
            .windows(text.len())
            .position(|part| part == text)
            .expect("the range");
        let data = &bytes[at + text.len()..];
        // The highest port is the first bit that is set: 1234 = 8 * 154 + 2.
        assert_eq!((data[0], data[1], data[3]), (0x9b, 0x01, 0), "{data:?}");
        assert_eq!(data[2], 0b100);
        assert_eq!((data[2 + 153], data[2 + 154]), (0b10, 1));
        let again = Record::read(&bytes).expect("reads");
        assert_eq!(again.taken().collect::<Vec<_>>(), [30000, 30009, 31234]);
        assert!(again.range == range);
    }

    #[test]
    fn every_port_is_tried_once_and_the_lower_ones_last() {
        for (range, reserved) in [(30000..=30015, 0), (30000..=30019, 16), (30000..=32767, 86)] {
            let size = range.len();
            let tried: Vec<u16> = PortRange::new(range).candidates().collect();
            assert_eq!(tried.iter().collect::<HashSet<_>>().len(), size);
            let last = &tried[size - reserved..];
            assert!(last.iter().all(|port| usize::from(port - 30000) < reserved));
        }
    }

    #[test]
    fn a_merge_takes_all_or_nothing() {
        let range = PortRange::new(30000..=30019);
        let mut record = Record::empty(&range);
        record.take(30001);
        let bytes = record.encode().expect("encodes");
        let apply =
            |take: &[u16], free: &[u16]| range.merge(take.to_vec(), free.to_vec()).apply(Some(&bytes));
        assert_eq!(apply(&[30000, 30001], &[]), Merged::Refuse);
        assert_eq!(apply(&[], &[30007]), Merged::Keep);
        let Merged::Put(next) = apply(&[30002], &[30001]) else {
            panic!("30002 is free");
        };
        let next = Record::read(&next).expect("reads");
        assert_eq!(next.taken().collect::<Vec<_>>(), [30002]);
        assert_eq!(range.merge(vec![30000], Vec::new()).apply(None), Merged::Refuse);
        let other = PortRange::new(30000..=30010);
        assert_eq!(
            other.merge(vec![30000], Vec::new()).apply(Some(&bytes)),
            Merged::Refuse
        );
    }
}
