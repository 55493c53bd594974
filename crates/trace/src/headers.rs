//! How cause and stages travel: request headers, set by a tower layer around a client.

use crate::context::MAX_STAGES;
use crate::{Cause, Stage, Work, now_us};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use std::task::{Context, Poll};
use tower::{Layer, Service};

pub const CAUSE_HEADER: HeaderName = HeaderName::from_static("x-skiff-cause");
pub const STAGES_HEADER: HeaderName = HeaderName::from_static("x-skiff-stages");

/// The writer's clock when it sent the request.
pub const SENT_HEADER: HeaderName = HeaderName::from_static("x-skiff-sent");
/// Times beyond the year 2255 are nonsense, and so are clocks this far apart.
const MAX_US: i64 = 1 << 53;

/// Longer headers are ignored, and so are further stages: marks are kept in memory and come from any client.
const MAX_HEADER: usize = 4096;

/// Adds the cause and the stages of the work around the caller to each write.
#[derive(Debug, Clone, Copy, Default)]
pub struct TraceHeaders;

impl<S> Layer<S> for TraceHeaders {
    type Service = TraceHeadersService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        TraceHeadersService { inner }
    }
}

#[derive(Debug, Clone)]
pub struct TraceHeadersService<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for TraceHeadersService<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        if request.method() != Method::GET {
            if let Some(work) = Work::current() {
                write_headers(&work, request.headers_mut());
            }
            request
                .headers_mut()
                .insert(SENT_HEADER, HeaderValue::from(now_us()));
        }
        self.inner.call(request)
    }
}

fn write_headers(work: &Work, headers: &mut HeaderMap) {
    if let Some(value) = work
        .cause()
        .and_then(|c| HeaderValue::from_str(&c.to_string()).ok())
    {
        headers.insert(CAUSE_HEADER, value);
    }
    let stages = work.take_stages();
    if stages.is_empty() {
        return;
    }
    let text: Vec<String> = stages
        .iter()
        .map(|s| format!("{}={}+{}", s.name.replace([',', '='], "_"), s.start_us, s.dur_us))
        .collect();
    if let Ok(value) = HeaderValue::from_str(&text.join(",")) {
        headers.insert(STAGES_HEADER, value);
    }
}

/// What a request says of its cause and stages. Nonsense reads as nothing: it must not fail a write.
pub fn read_headers(headers: &HeaderMap) -> (Option<Cause>, Vec<Stage>) {
    let text = |name: HeaderName| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .filter(|v| v.len() <= MAX_HEADER)
    };
    let cause = text(CAUSE_HEADER).and_then(|t| t.parse().ok());
    let stages = text(STAGES_HEADER)
        .map(|t| t.split(',').take(MAX_STAGES).filter_map(read_stage).collect())
        .unwrap_or_default();
    (cause, stages)
}

/// How far the writer's clock is behind, if it said what it was; see [`crate::Mark::behind_us`].
pub fn behind_us(headers: &HeaderMap, arrived_us: i64) -> Option<i64> {
    let sent: i64 = headers.get(SENT_HEADER)?.to_str().ok()?.parse().ok()?;
    (0..MAX_US)
        .contains(&sent)
        .then(|| arrived_us.saturating_sub(sent))
}

fn read_stage(text: &str) -> Option<Stage> {
    let (name, times) = text.split_once('=')?;
    let (start, duration) = times.split_once('+')?;
    let (start_us, dur_us) = (start.parse().ok()?, duration.parse().ok()?);
    let sound = 0..MAX_US;
    (sound.contains(&start_us) && sound.contains(&dur_us)).then(|| Stage {
        name: name.to_owned(),
        start_us,
        dur_us,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let cause: Cause = "deployments.apps/default/web@12".parse().unwrap();
        let work = Work::new(Some(cause.clone()));
        work.push("queue", 5, 7);
        work.push("start web", 20, 1);
        let mut headers = HeaderMap::new();
        write_headers(&work, &mut headers);
        let (read_cause, stages) = read_headers(&headers);
        assert_eq!(read_cause, Some(cause));
        assert_eq!(stages.len(), 2);
        assert_eq!(
            stages[1],
            Stage {
                name: "start web".into(),
                start_us: 20,
                dur_us: 1
            }
        );
        assert!(work.take_stages().is_empty(), "stages ride on one write only");
    }

    #[test]
    fn a_client_cannot_fill_the_memory_with_stages() {
        let mut headers = HeaderMap::new();
        let many = "a=1+1,".repeat(600);
        headers.insert(STAGES_HEADER, HeaderValue::from_str(&many).unwrap());
        assert_eq!(read_headers(&headers).1.len(), MAX_STAGES);
    }

    #[test]
    fn the_writers_clock() {
        let check = |sent: &'static str, expected: Option<i64>| {
            let headers = HeaderMap::from_iter([(SENT_HEADER, HeaderValue::from_static(sent))]);
            assert_eq!(behind_us(&headers, 1_000), expected, "{sent}");
        };
        check("400", Some(600));
        check("3000", Some(-2_000));
        for nonsense in ["", "-1", "now", "9223372036854775807"] {
            check(nonsense, None);
        }
        assert_eq!(behind_us(&HeaderMap::new(), 1_000), None);
    }

    #[test]
    fn nonsense_is_ignored() {
        for (cause, stages) in [("x", "y"), ("a/b/c", "a=1"), ("", "a=b+c,=,+")] {
            let mut headers = HeaderMap::new();
            headers.insert(CAUSE_HEADER, HeaderValue::from_static(cause));
            headers.insert(STAGES_HEADER, HeaderValue::from_static(stages));
            assert_eq!(read_headers(&headers), (None, vec![]));
        }
    }
}
