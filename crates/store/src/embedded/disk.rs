//! The data on disk: one SQLite database with a log of versions. It decides nothing; it stores what
//! the writer decided and gives it back in order.
//!
//! `kv` has one row a revision (`value` NULL: deleted), `meta` the newest revision whose history is gone. Rows up to
//! that one are exactly the keys alive then. `user_version` is the format; format 2 has a checksum in each row, rows of
//! format 1 are read without one. A row that does not match its checksum makes its key unreadable, never absent.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, TransactionBehavior, params};

use crate::{Error, Result, unreadable_value};

const FORMAT: i64 = 2;
/// `application_id` of the database: "skif".
const APPLICATION: i64 = 0x736b_6966;
const FILE: &str = "store.db";
const PAGE: u64 = 8192;
/// Room for the write-ahead log: as long as it gets before SQLite starts it over, and some.
const LOG: u64 = 1100 * (PAGE + 24);

/// One version of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub revision: i64,
    pub key: std::sync::Arc<str>,
    /// 0 in a delete.
    pub create_revision: i64,
    pub value: Option<Bytes>,
    /// Unix seconds; 0: never.
    pub expires: u64,
}

impl Row {
    /// Of everything in the row, so that rot anywhere in it is noticed.
    fn checksum(&self) -> i64 {
        let mut hasher = crc32fast::Hasher::new();
        for number in [self.revision, self.create_revision, self.expires as i64] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&(self.key.len() as u64).to_le_bytes());
        hasher.update(self.key.as_bytes());
        hasher.update(&[u8::from(self.value.is_some())]);
        hasher.update(self.value.as_deref().unwrap_or_default());
        i64::from(hasher.finalize())
    }
}

/// Why a value cannot be read that rotted on the disk.
pub(super) const DAMAGED: &str = "the stored value does not match its checksum";

/// Reads a row whose first columns are `COLUMNS`. One that is not as it was written has an unreadable value, also
/// where there seems to be none: what looks like a deletion may have been anything.
fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Row> {
    let revision: i64 = row.get(0)?;
    let mut sound = true;
    let bytes = |column: ValueRef<'_>| match column {
        ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Some(Bytes::copy_from_slice(bytes)),
        _ => None,
    };
    let mut number = |column: usize| {
        let number = row.get_ref(column)?.as_i64();
        sound &= number.is_ok();
        Ok::<i64, rusqlite::Error>(number.unwrap_or(0))
    };
    let (create_revision, expires) = (number(2)?, number(4)?);
    let key = bytes(row.get_ref(1)?).unwrap_or_default();
    let value = match row.get_ref(3)? {
        ValueRef::Null => None,
        value => Some(bytes(value).unwrap_or_else(|| unreadable_value(DAMAGED))),
    };
    let mut read = Row {
        revision,
        key: String::from_utf8_lossy(&key).into(),
        create_revision,
        value,
        expires: u64::try_from(expires).unwrap_or(0),
    };
    sound &= match row.get_ref(5)? {
        // Written before there were checksums.
        ValueRef::Null => true,
        checksum => checksum
            .as_i64()
            .is_ok_and(|checksum| checksum == read.checksum()),
    };
    if !sound {
        read.value = Some(unreadable_value(DAMAGED));
        read.expires = 0;
        if read.create_revision <= 0 || read.create_revision > revision {
            read.create_revision = revision;
        }
    }
    Ok(read)
}

const COLUMNS: &str = "revision, key, create_revision, value, expires, checksum";

pub struct Disk {
    connection: Connection,
    dir: PathBuf,
    max_bytes: Option<u64>,
}

/// Gives the write-ahead log its room at once, filled with zeros: a commit that makes the file longer, or is the first
/// to write a part of it, takes twice the time of one that does not, because the file system must write its own
/// journal too. SQLite stops reading the log at the first frame that it did not write. Without the room everything
/// works as well, so a disk with little of it keeps it for data.
fn reserve_log(dir: &Path) {
    let log = dir.join(format!("{FILE}-wal"));
    if super::reserve::free(dir) < 8 * LOG {
        return;
    }
    let fill = || {
        let log = fs::OpenOptions::new().write(true).open(&log)?;
        let zeros = vec![0; 1 << 20];
        let mut end = log.metadata()?.len();
        if end >= LOG {
            return Ok(());
        }
        while end < LOG {
            let count = zeros.len().min((LOG - end) as usize);
            log.write_all_at(&zeros[..count], end)?;
            end += count as u64;
        }
        log.sync_all()
    };
    if let Err(error) = fill() {
        let error: std::io::Error = error;
        tracing::debug!(log = %log.display(), %error, "no room was reserved for the log");
    }
}

/// Bytes on disk of the database in `dir`, with its write-ahead log.
pub fn size(dir: &Path) -> u64 {
    [FILE.to_owned(), format!("{FILE}-wal")]
        .iter()
        .filter_map(|name| fs::metadata(dir.join(name)).ok())
        .map(|metadata| metadata.len())
        .sum()
}

impl Disk {
    pub fn open(dir: &Path) -> Result<Disk> {
        let io = |error: std::io::Error| Error::Io(format!("{}: {error}", dir.display()));
        skiff_fs::create_folders_durably(dir, 0o700).map_err(io)?;
        let file = dir.join(FILE);
        // Secrets are in here. SQLite gives its log the mode of the database.
        fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&file)
            .map_err(io)?;
        // SQLite syncs the directory for files that it makes; this one was made here.
        skiff_fs::sync_folder(dir).map_err(io)?;
        let connection = Connection::open(&file).map_err(|error| translate(dir, error))?;
        let disk = Disk {
            connection,
            dir: dir.to_owned(),
            max_bytes: None,
        };
        disk.prepare().map_err(|error| match error {
            Prepare::Sqlite(error) => translate(dir, error),
            Prepare::Refused(error) => error,
        })?;
        reserve_log(dir);
        Ok(disk)
    }

    fn prepare(&self) -> std::result::Result<(), Prepare> {
        let connection = &self.connection;
        // One process only: the state in memory is the truth for reads. This also spares the shared
        // memory file of the log.
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        // Before anything is written. In WAL mode this is FULL; before that it also makes the removal of the rollback
        // journal durable, which would otherwise come back after a power cut and undo the start of the database.
        connection.pragma_update(None, "synchronous", "EXTRA")?;
        let number = |name: &str| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        let (format, application) = (number("user_version")?, number("application_id")?);
        let tables: i64 = connection.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0))?;
        if tables > 0 && application != APPLICATION {
            let file = self.dir.join(FILE);
            return Err(Prepare::Refused(Error::Corrupt(format!(
                "{} is not skiff's",
                file.display()
            ))));
        }
        if format > FORMAT {
            let place = self.dir.display().to_string();
            let refused = Error::NewerVersion {
                place,
                found: format,
                known: FORMAT,
                flag: "--data-dir",
            };
            return Err(Prepare::Refused(refused));
        }
        if tables == 0 {
            connection.pragma_update(None, "page_size", PAGE as i64)?;
        }
        connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
        connection.pragma_update(None, "journal_size_limit", 16 << 20)?;
        connection.set_prepared_statement_cache_capacity(16);
        if tables == 0 {
            connection.execute_batch(&format!(
                "BEGIN IMMEDIATE;
                 CREATE TABLE kv (revision INTEGER PRIMARY KEY, key TEXT NOT NULL,
                   create_revision INTEGER NOT NULL, value BLOB, expires INTEGER NOT NULL, checksum INTEGER);
                 CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
                 INSERT INTO meta VALUES ('compacted', 1);
                 PRAGMA application_id = {APPLICATION};
                 PRAGMA user_version = {FORMAT};
                 COMMIT;"
            ))?;
        } else if format == 1 {
            connection.execute_batch(
                "BEGIN IMMEDIATE;
                 ALTER TABLE kv ADD COLUMN checksum INTEGER;
                 PRAGMA user_version = 2;
                 COMMIT;",
            )?;
        }
        Ok(())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Opens the files anew, after the disk failed under them: descriptors may be good for nothing.
    pub fn reopen(&mut self) -> Result<()> {
        let no_tables = Connection::open_in_memory().map_err(|error| translate(&self.dir, error))?;
        // The present connection holds the lock. Until another stands, commits fail for want of tables.
        drop(std::mem::replace(&mut self.connection, no_tables));
        let mut disk = Disk::open(&self.dir)?;
        if let Some(bytes) = self.max_bytes {
            disk.limit_size(bytes)?;
        }
        *self = disk;
        Ok(())
    }

    /// Writes something that nobody reads, through to the disk. It differs each time, or SQLite would not write it.
    pub fn probe(&mut self) -> Result<()> {
        let count =
            "INSERT INTO meta VALUES ('probes', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1";
        self.connection
            .execute(count, [])
            .map(drop)
            .map_err(|error| translate(&self.dir, error))
    }

    pub fn limit_size(&mut self, bytes: u64) -> Result<()> {
        self.max_bytes = Some(bytes);
        let pages = i64::try_from(bytes / PAGE).unwrap_or(i64::MAX).max(1);
        self.connection
            .pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))
            .map_err(|error| translate(&self.dir, error))
    }

    pub fn compacted(&self) -> Result<i64> {
        self.connection
            .query_row("SELECT value FROM meta WHERE name = 'compacted'", [], |row| {
                row.get(0)
            })
            .map_err(|error| translate(&self.dir, error))
    }

    /// All rows after a revision, in the order of their revisions.
    pub fn load(&self, after: i64, mut each: impl FnMut(Row)) -> Result<()> {
        let mut load = || {
            let select = format!("SELECT {COLUMNS} FROM kv WHERE revision > ? ORDER BY revision");
            let mut statement = self.connection.prepare(&select)?;
            let mut rows = statement.query([after])?;
            while let Some(row) = rows.next()? {
                each(read(row)?);
            }
            Ok(())
        };
        load().map_err(|error| translate(&self.dir, error))
    }

    /// The values of these revisions; `None` for one that is gone, or was a deletion.
    pub fn values(&self, revisions: &[i64]) -> Result<Vec<Option<Bytes>>> {
        let read = || {
            let select = format!("SELECT {COLUMNS} FROM kv WHERE revision = ?");
            let mut select = self.connection.prepare_cached(&select)?;
            let mut values = Vec::with_capacity(revisions.len());
            for revision in revisions {
                let mut rows = select.query([revision])?;
                values.push(match rows.next()? {
                    Some(row) => read(row)?.value,
                    None => None,
                });
            }
            Ok(values)
        };
        read().map_err(|error| translate(&self.dir, error))
    }

    /// All rows, or none. When this returns `Ok` they are on disk.
    pub fn commit<'a>(&mut self, rows: impl Iterator<Item = &'a Row>) -> Result<()> {
        let dir = &self.dir;
        let connection = &mut self.connection;
        let commit = || {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            {
                let mut insert = transaction.prepare_cached("INSERT INTO kv VALUES (?, ?, ?, ?, ?, ?)")?;
                for row in rows {
                    let expires = i64::try_from(row.expires).unwrap_or(i64::MAX);
                    insert.execute(params![
                        row.revision,
                        &*row.key,
                        row.create_revision,
                        row.value.as_deref(),
                        expires,
                        row.checksum()
                    ])?;
                }
            }
            transaction.commit()
        };
        commit().map_err(|error| translate(dir, error))
    }

    /// Removes the rows of `superseded` revisions, and records how far history is gone.
    pub fn compact(&mut self, superseded: &[i64], compacted: i64) -> Result<()> {
        let dir = &self.dir;
        let connection = &mut self.connection;
        let mut compact = || {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            {
                let mut delete = transaction.prepare_cached("DELETE FROM kv WHERE revision = ?")?;
                for revision in superseded {
                    delete.execute([revision])?;
                }
                transaction
                    .prepare_cached("UPDATE meta SET value = ? WHERE name = 'compacted'")?
                    .execute([compacted])?;
            }
            transaction.commit()
        };
        compact().map_err(|error| translate(dir, error))
    }
}

enum Prepare {
    Sqlite(rusqlite::Error),
    Refused(Error),
}

impl From<rusqlite::Error> for Prepare {
    fn from(error: rusqlite::Error) -> Prepare {
        Prepare::Sqlite(error)
    }
}

fn translate(dir: &Path, error: rusqlite::Error) -> Error {
    let text = format!("{}: {error}", dir.join(FILE).display());
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Error::DiskFull(text),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Error::InUse(dir.display().to_string()),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Error::Corrupt(text),
        Some(ErrorCode::TooBig) => Error::TooLarge(text),
        Some(_) => Error::Io(text),
        // Not SQLite's own: a row of a shape that this code did not write.
        None => Error::Corrupt(text),
    }
}
