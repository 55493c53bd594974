//! What a backup says, before it is sealed into a file: a manifest, then files of keys, then objects, then how many
//! there were. The same is sent by a running server over its socket, without files.
//!
//! A record is a letter and its fields; text and bytes have their length before them. Numbers are big-endian.

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use skiff_store::KeyValue;
use std::io::{Read, Write};

/// Longer than any key or value that a store takes.
const LONGEST: u32 = 256 << 20;
/// Read at once, so that a length that lies costs no memory.
const PIECE: usize = 1 << 20;

/// What is said of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub cluster: String,
    /// Of the skiff that made the backup.
    pub version: String,
    /// In UTC, for people.
    pub created: String,
    /// All objects are as they were at this revision.
    pub revision: i64,
    pub pod_cidr: String,
    pub service_cidr: String,
    /// Whether the store encrypts anything. The objects of a backup are in the clear.
    #[serde(default)]
    pub encrypted_at_rest: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Manifest(Manifest),
    /// A file of the data directory, by its path in there.
    File {
        path: String,
        content: Vec<u8>,
    },
    Object(KeyValue),
    /// The end, and how many objects there were.
    End(u64),
    /// Why there is no more; only a server says so.
    Failed(String),
}

impl Record {
    pub fn write(&self, to: &mut impl Write) -> Result<()> {
        match self {
            Record::Manifest(manifest) => {
                to.write_all(b"M")?;
                write_bytes(to, &serde_json::to_vec(manifest)?)
            }
            Record::File { path, content } => {
                to.write_all(b"F")?;
                write_bytes(to, path.as_bytes())?;
                write_bytes(to, content)
            }
            Record::Object(object) => {
                to.write_all(b"O")?;
                to.write_all(&object.create_revision.to_be_bytes())?;
                to.write_all(&object.mod_revision.to_be_bytes())?;
                write_bytes(to, object.key.as_bytes())?;
                write_bytes(to, &object.value)
            }
            Record::End(count) => {
                to.write_all(b"E")?;
                Ok(to.write_all(&count.to_be_bytes())?)
            }
            Record::Failed(why) => {
                to.write_all(b"X")?;
                write_bytes(to, why.as_bytes())
            }
        }
    }

    pub fn read(from: &mut impl Read) -> Result<Record> {
        let mut letter = [0];
        from.read_exact(&mut letter)?;
        Ok(match &letter {
            b"M" => {
                let manifest = serde_json::from_slice(&read_bytes(from)?);
                Record::Manifest(manifest.context("its manifest cannot be read")?)
            }
            b"F" => Record::File {
                path: read_text(from)?,
                content: read_bytes(from)?,
            },
            b"O" => Record::Object(KeyValue {
                create_revision: read_number(from)?,
                mod_revision: read_number(from)?,
                key: read_text(from)?.into(),
                value: Bytes::from(read_bytes(from)?),
            }),
            b"E" => Record::End(u64::try_from(read_number(from)?)?),
            b"X" => Record::Failed(read_text(from)?),
            [other] => bail!("it has a record of a kind that this skiff does not know ({other})"),
        })
    }
}

fn write_bytes(to: &mut impl Write, bytes: &[u8]) -> Result<()> {
    to.write_all(&u32::try_from(bytes.len())?.to_be_bytes())?;
    Ok(to.write_all(bytes)?)
}

fn read_number(from: &mut impl Read) -> Result<i64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(i64::from_be_bytes(bytes))
}

fn read_bytes(from: &mut impl Read) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    ensure!(length <= LONGEST, "it has a value of {length} bytes");
    let (length, mut bytes) = (length as usize, Vec::new());
    while bytes.len() < length {
        let start = bytes.len();
        bytes.resize(length.min(start + PIECE), 0);
        from.read_exact(&mut bytes[start..])?;
    }
    Ok(bytes)
}

fn read_text(from: &mut impl Read) -> Result<String> {
    String::from_utf8(read_bytes(from)?).context("it has a name that is not text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        let records = [
            Record::Manifest(Manifest {
                cluster: "one".into(),
                version: "v1".into(),
                created: "today".into(),
                revision: 77,
                pod_cidr: "10.244.0.0/16".into(),
                service_cidr: "10.96.0.0/12".into(),
                encrypted_at_rest: true,
            }),
            Record::File {
                path: "pki/ca.key".into(),
                content: b"key".to_vec(),
            },
            Record::Object(KeyValue {
                key: "/registry/pods/a/b".into(),
                value: Bytes::from(vec![3; PIECE + 5]),
                create_revision: 5,
                mod_revision: 70,
            }),
            Record::End(1),
            Record::Failed("the disk is gone".into()),
        ];
        let mut bytes = Vec::new();
        for record in &records {
            record.write(&mut bytes).unwrap();
        }
        let mut from = &bytes[..];
        for record in &records {
            assert_eq!(&Record::read(&mut from).unwrap(), record);
        }
        assert!(Record::read(&mut from).is_err());
        for end in 0..200 {
            let mut cut = &bytes[..end];
            while Record::read(&mut cut).is_ok() {}
        }
        let lies = [
            b'O', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255,
        ];
        assert!(Record::read(&mut &lies[..]).is_err());
    }
}
