//! How failures of the store and the cache look to a client. Detail that helps only the operator
//! goes to the log.

use skiff_meta::Status;

/// A failed store call. 503 tells clients to try again; a full disk is a 500 that says so, because
/// clients know no better code for it.
pub fn store(error: skiff_store::Error) -> Status {
    use skiff_store::Error;
    match error {
        Error::Compacted { .. } => expired(),
        Error::FutureRevision { requested, current } => {
            Status::resource_version_too_large(requested, current)
        }
        // COMPAT: upstream lets etcd's words out as they are.
        Error::TooLarge(message) => Status::failure(500, "", message),
        Error::Unavailable(detail) => {
            tracing::warn!(%detail, "the store is unavailable");
            Status::service_unavailable("the store is currently unable to handle the request")
        }
        Error::DiskFull(detail) => {
            tracing::error!(%detail, "the store's disk is full");
            Status::internal("the store's disk is full")
        }
        Error::Io(detail) => {
            tracing::error!(%detail, "the store's disk failed");
            Status::internal("the store's disk failed")
        }
        error => {
            tracing::error!(%error, "a store call failed");
            Status::internal(error)
        }
    }
}

/// The 410 of a resourceVersion that history no longer holds.
pub fn expired() -> Status {
    Status::expired("The resourceVersion for the provided list is too old.")
}

pub fn is(status: &Status, reason: &str) -> bool {
    status.reason == reason
}

pub fn is_already_exists(status: &Status) -> bool {
    is(status, "AlreadyExists")
}

pub fn is_not_found(status: &Status) -> bool {
    is(status, "NotFound")
}

/// The answer when every drawn name was taken.
pub fn generate_name_conflict(status: Status) -> Status {
    let mut status = status.retry_after(1);
    if let Some(details) = &status.details {
        let resource = skiff_meta::GroupResource::new(details.group.as_str(), details.kind.as_str());
        status.message = format!(
            "{resource} \"{}\" already exists, the server was not able to generate a unique name for the object",
            details.name
        );
    }
    status
}

pub fn prefixed(prefix: &str, mut status: Status) -> Status {
    status.message.insert_str(0, prefix);
    status
}
