//! How many files a process may have open. The daemon has a connection a client and takes all it may; what it starts
//! gets the limit that the daemon was started with: programs in containers go by it, and some walk all of it.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// How a shim is told the limit.
const VARIABLE: &str = "SKIFF_OPEN_FILES";

/// The limit that the daemon was started with, if it was raised.
static BEFORE: OnceLock<u64> = OnceLock::new();

pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if let Some(current) = limit.current
        && limit.maximum.is_none_or(|maximum| current < maximum)
        && set(limit.maximum)
    {
        let _ = BEFORE.set(current);
    }
}

/// What a shim has to know.
pub fn before() -> Option<(&'static str, String)> {
    BEFORE.get().map(|limit| (VARIABLE, limit.to_string()))
}

/// In a shim: back to what it was.
pub fn lower() {
    if let Some(limit) = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok()) {
        set(Some(limit));
    }
}

fn set(current: Option<u64>) -> bool {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_and_told() {
        let limit = getrlimit(Resource::Nofile);
        raise();
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
        let told = before().map(|(_, text)| text);
        let raised = limit.current != limit.maximum;
        assert_eq!(told, raised.then(|| limit.current.expect("a limit").to_string()));
    }
}
