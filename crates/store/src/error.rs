//! What can go wrong in a store. The registry turns these into `Status`; nothing here is shown to a
//! client as it stands.

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `revision` is the newest revision whose history is gone.
    #[error("the required revision has been compacted (history starts after {revision})")]
    Compacted { revision: i64 },
    #[error("revision {requested} is in the future (the store is at {current})")]
    FutureRevision { requested: i64, current: i64 },
    /// A watcher did not read for so long that its bounded queue overflowed.
    #[error("the watcher was too slow and was dropped")]
    Lagged,
    /// The store cannot be reached or did not answer; the write may or may not have happened.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    #[error("the store's disk is full: {0}")]
    DiskFull(String),
    #[error("the store's disk failed: {0}")]
    Io(String),
    #[error("value too large: {0}")]
    TooLarge(String),
    /// The value cannot be encrypted, so nothing was written.
    #[error("{0}")]
    Encryption(String),
    #[error("the store's data is damaged: {0}")]
    Corrupt(String),
    #[error(
        "data in {place} was written by a newer skiff (format {found}, this one knows up to {known}); use that version, or another {flag}"
    )]
    NewerVersion {
        place: String,
        found: i64,
        known: i64,
        flag: &'static str,
    },
    #[error("{0} is in use by another process; stop it, or use another --data-dir")]
    InUse(String),
    #[error("{0}")]
    Invalid(String),
}
