//! The marks that every hop leaves, and what is made of them.
//!
//! A write through the front door becomes a [`Mark`]: who wrote, what came of it, how long each gate took, and
//! its [`Cause`], the object version that woke the writer. Controllers, scheduler and node run each piece of
//! work inside [`scope`], so that the requests they send carry the cause and the stages of their own work
//! ([`TraceHeaders`]). The server keeps marks in a bounded [`Recorder`]; [`waterfall`] turns them into the path
//! from one write to the last thing it brought about. Where several servers keep marks, [`merge`] puts them on one clock.
//!
//! This crate knows no kind and talks to nobody.

mod context;
mod headers;
mod merge;
mod recorder;
mod render;
mod waterfall;

pub use context::{Work, current_cause, next_try, note, now_us, record_stage, scope, stage};
pub use headers::{
    CAUSE_HEADER, SENT_HEADER, STAGES_HEADER, TraceHeaders, TraceHeadersService, behind_us, read_headers,
};
pub use merge::{ClockOffset, Source, merge};
pub use recorder::Recorder;
pub use render::{Style, human};
pub use waterfall::{Question, Step, Waterfall, waterfall};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The [`note`] of a status write which says that the object is now all that was asked for.
pub const COMPLETE: &str = "complete";

/// Begins the name of a stage that lies in the future: from a failed try of the container named after it to the
/// moment of the next one. It is no step of a path.
pub const NEXT_TRY: &str = "next try: ";

/// The resource of a mark that is no write to the API: the service proxy has brought the rules of a service into the
/// kernel.
pub const SERVICE_RULES: &str = "servicerules.kernel";

/// How many marks a component may report in one request.
pub const MAX_REPORTED: usize = 256;

/// What a component reports of work that ends in no write: the body of `POST /debug/skiff/trace`, and what a GET of
/// that path answers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Marks {
    pub marks: Vec<Mark>,
    /// The sender's clock when this was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now_us: Option<i64>,
}

/// An object version: what woke a writer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cause {
    /// Resource and group as upstream prints them: `pods`, `deployments.apps`.
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub version: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}/{}@{}",
            self.resource, self.namespace, self.name, self.version
        )
    }
}

/// A text that is not `resource/namespace/name@version`.
#[derive(Debug, PartialEq, Eq)]
pub struct NotACause;

impl FromStr for Cause {
    type Err = NotACause;

    fn from_str(text: &str) -> Result<Self, NotACause> {
        let (object, version) = text.rsplit_once('@').ok_or(NotACause)?;
        let mut parts = object.splitn(3, '/');
        let (Some(resource), Some(namespace), Some(name)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(NotACause);
        };
        let own = str::to_owned;
        Ok(Self {
            resource: own(resource),
            namespace: own(namespace),
            name: own(name),
            version: own(version),
        })
    }
}

/// A named stretch of time. Times are microseconds since the Unix epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    pub name: String,
    pub start_us: i64,
    pub dur_us: i64,
}

/// What one write through the front door left behind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mark {
    pub start_us: i64,
    pub dur_us: i64,
    pub user: String,
    pub verb: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The version that the write produced; empty if it failed.
    pub resource_version: String,
    pub code: u16,
    pub cause: Option<Cause>,
    /// What the writer spent its time on before it sent the request.
    pub client_stages: Vec<Stage>,
    /// The gates of the front door, in order.
    pub stages: Vec<Stage>,
    /// The server's clock when the request arrived, less the writer's when it was sent: how far the writer's clock is
    /// behind, and the time on the way. The times of `client_stages`, and of [`SERVICE_RULES`], are by the writer's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind_us: Option<i64>,
    /// The server that kept it, where there are several. Set by [`merge`].
    #[serde(skip_serializing_if = "String::is_empty")]
    pub server: String,
}

impl Mark {
    /// The object version that this write made, as others name it when it wakes them.
    pub fn made(&self) -> Cause {
        Cause {
            resource: self.resource.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            version: self.resource_version.clone(),
        }
    }

    pub fn end_us(&self) -> i64 {
        self.start_us.saturating_add(self.dur_us)
    }
}
