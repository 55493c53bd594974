//! A page of samples that were just read, in the Prometheus text format.

use std::fmt::Write as _;

use http::{HeaderValue, Response, StatusCode};
use skiff_streaming::Body;

use super::text;

/// A value and its time in Unix nanoseconds, if it has one.
pub type Reading = (f64, Option<i64>);
/// A reading with its labels.
pub type Sample = (String, f64, Option<i64>);

#[derive(Default)]
pub struct Page(String);

impl Page {
    pub fn into_text(self) -> String {
        self.0
    }

    /// A family without samples is not shown.
    pub fn family(&mut self, name: &str, kind: &str, help: &str, samples: Vec<Sample>) {
        if samples.is_empty() {
            return;
        }
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value, time) in samples {
            let _ = write!(self.0, "{name}{labels} {value}");
            if let Some(time) = time {
                let _ = write!(self.0, " {}", time / 1_000_000);
            }
            self.0.push('\n');
        }
    }
}

/// The answer to a collector.
pub fn answer(page: String) -> Response<Body> {
    let mut response = text(StatusCode::OK, page);
    response.headers_mut().insert(
        "content-type",
        HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
    );
    response
}

#[allow(clippy::cast_precision_loss)]
pub fn float(value: u64) -> f64 {
    value as f64
}

pub fn seconds(nanos: u64) -> f64 {
    std::time::Duration::from_nanos(nanos).as_secs_f64()
}
