//! Reads the SQLite database of k3s, whose table `kine` is a log of versions: `id` is the revision, `name` the key.
//!
//! All is read in one transaction, so that it is the state at one revision also while k3s runs, and in pages.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use rusqlite::{Connection, OpenFlags, params};

use crate::{Error, KeyValue, Result};

/// Keys that are read at once.
const PAGE: i64 = 200;

pub struct Kine {
    connection: Connection,
    file: PathBuf,
    revision: i64,
    after: String,
}

impl Kine {
    pub fn open(file: &Path) -> Result<Kine> {
        let failed = |error: rusqlite::Error| translate(file, &error);
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(file, flags).map_err(failed)?;
        let tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'kine'";
        let found: i64 = connection
            .query_row(tables, [], |row| row.get(0))
            .map_err(failed)?;
        if found == 0 {
            let file = file.display();
            return Err(Error::Invalid(format!(
                "{file} has no table \"kine\": it is not the database of k3s"
            )));
        }
        // Whatever is read from here on is of one moment.
        connection.execute_batch("BEGIN").map_err(failed)?;
        let newest = "SELECT coalesce(max(id), 0) FROM kine";
        let revision = connection
            .query_row(newest, [], |row| row.get(0))
            .map_err(failed)?;
        Ok(Kine {
            connection,
            file: file.to_owned(),
            revision,
            after: "/registry/".to_owned(),
        })
    }

    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The next keys below `/registry/` in order; empty at the end.
    pub fn next_page(&mut self) -> Result<Vec<KeyValue>> {
        loop {
            let (rows, page) = self.read().map_err(|error| translate(&self.file, &error))?;
            if rows == 0 || !page.is_empty() {
                return Ok(page);
            }
        }
    }

    /// How many names there were, and those that are not deleted.
    fn read(&mut self) -> rusqlite::Result<(usize, Vec<KeyValue>)> {
        // The newest version of each of the next names. '0' is the character after '/'.
        let mut select = self.connection.prepare_cached(
            "SELECT id, name, created, deleted, create_revision, value FROM kine WHERE id IN
               (SELECT max(id) FROM kine WHERE name > ? AND name < '/registry0' GROUP BY name ORDER BY name LIMIT ?)
             ORDER BY name",
        )?;
        let mut rows = select.query(params![self.after, PAGE])?;
        let (mut count, mut page) = (0, Vec::new());
        while let Some(row) = rows.next()? {
            count += 1;
            let revision: i64 = row.get(0)?;
            self.after = row.get(1)?;
            if row.get::<_, Option<i64>>(3)?.unwrap_or(0) != 0 {
                continue;
            }
            let created = row.get::<_, Option<i64>>(2)?.unwrap_or(0) != 0;
            let create_revision = row.get::<_, Option<i64>>(4)?.unwrap_or(0);
            page.push(KeyValue {
                key: self.after.as_str().into(),
                value: Bytes::from(row.get::<_, Option<Vec<u8>>>(5)?.unwrap_or_default()),
                // The row that creates a key names no revision: it is its own.
                create_revision: if created || create_revision <= 0 {
                    revision
                } else {
                    create_revision
                },
                mod_revision: revision,
            });
        }
        Ok((count, page))
    }
}

fn translate(file: &Path, error: &rusqlite::Error) -> Error {
    Error::Invalid(format!("cannot read {}: {error}", file.display()))
}
