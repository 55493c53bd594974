//! The service proxy's marks for the trace: it writes nothing to the API, so it reports which Services and EndpointSlices
//! it has brought into the kernel. Reports are sent beside the work and may be lost; rules never wait for them.

use parking_lot::Mutex;
use skiff_client::{Cause, Client, cause_of};
use skiff_trace::{MAX_REPORTED, Mark, SERVICE_RULES, Stage, now_us};

/// What has changed since the last round.
#[derive(Default)]
pub(super) struct Marks {
    /// A leaf lock. Bounded by [`MAX_REPORTED`]: in a larger burst the oldest changes go unreported.
    noticed: Mutex<Vec<Noticed>>,
}

struct Noticed {
    at_us: i64,
    cause: Cause,
    service: String,
}

/// The changes that one round of the proxy takes into the kernel.
pub(super) struct Round {
    noticed: Vec<Noticed>,
    start_us: i64,
}

impl Marks {
    /// Remembers an object version that may change the rules of `service`.
    pub(super) fn noticed<K: kube::Resource<DynamicType = ()>>(&self, object: &K, service: Option<String>) {
        let Some(service) = service else { return };
        self.push([Noticed {
            at_us: now_us(),
            cause: cause_of(object),
            service,
        }]);
    }

    /// Call it before the informers are read: what comes later belongs to the next round.
    pub(super) fn begin(&self) -> Round {
        Round {
            noticed: std::mem::take(&mut *self.noticed.lock()),
            start_us: now_us(),
        }
    }

    /// The round failed; the next one does its work.
    pub(super) fn put_back(&self, round: Round) {
        self.push(round.noticed);
    }

    fn push(&self, more: impl IntoIterator<Item = Noticed>) {
        let mut noticed = self.noticed.lock();
        noticed.extend(more);
        let excess = noticed.len().saturating_sub(MAX_REPORTED);
        noticed.drain(..excess);
    }
}

impl Round {
    fn marks(self, now_us: i64) -> skiff_trace::Marks {
        let start_us = self.start_us;
        let mark = |noticed: Noticed| Mark {
            start_us,
            dur_us: (now_us - start_us).max(0),
            verb: "program".to_owned(),
            resource: SERVICE_RULES.to_owned(),
            namespace: noticed.cause.namespace.clone(),
            name: noticed.service,
            cause: Some(noticed.cause),
            client_stages: vec![Stage {
                name: "queue".to_owned(),
                start_us: noticed.at_us,
                dur_us: (start_us - noticed.at_us).max(0),
            }],
            ..Mark::default()
        };
        skiff_trace::Marks {
            marks: self.noticed.into_iter().map(mark).collect(),
            now_us: Some(now_us),
        }
    }

    /// How long ago the first of the changes was noticed, if there are any.
    pub(super) fn delay(&self) -> Option<std::time::Duration> {
        let first = self.noticed.iter().map(|noticed| noticed.at_us).min()?;
        let passed = u64::try_from(now_us() - first).unwrap_or_default();
        Some(std::time::Duration::from_micros(passed))
    }

    /// Tells the server that the rules are in the kernel now.
    pub(super) fn report(self, client: &Client) {
        let report = self.marks(now_us());
        if report.marks.is_empty() {
            return;
        }
        let client = client.clone();
        tokio::spawn(async move {
            let body = serde_json::to_vec(&report).unwrap_or_default();
            let request = http::Request::post("/debug/skiff/trace")
                .header(http::header::CONTENT_TYPE, "application/json")
                .body(body);
            let Ok(request) = request else { return };
            if let Err(error) = client.request_text(request).await {
                tracing::debug!(%error, "cannot report the service rules to the trace");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Service;

    fn service(name: String, version: usize) -> Service {
        let mut service = Service::default();
        service.metadata.namespace = Some("default".to_owned());
        service.metadata.name = Some(name);
        service.metadata.resource_version = Some(version.to_string());
        service
    }

    #[test]
    fn every_change_is_reported_once_and_after_a_failure_again() {
        let marks = Marks::default();
        marks.noticed(&service("web".to_owned(), 7), Some("web".to_owned()));
        marks.noticed(&service("stray".to_owned(), 8), None);
        let failed = marks.begin();
        assert!(marks.begin().marks(0).marks.is_empty());
        marks.put_back(failed);
        let round = marks.begin();
        let end = round.start_us + 30;
        let report = round.marks(end).marks;
        assert_eq!(report.len(), 1);
        assert_eq!(
            (
                report[0].resource.as_str(),
                report[0].name.as_str(),
                report[0].dur_us
            ),
            (SERVICE_RULES, "web", 30)
        );
        assert_eq!(
            report[0].cause.as_ref().map(ToString::to_string).as_deref(),
            Some("services/default/web@7")
        );
    }

    #[test]
    fn a_burst_does_not_grow_without_end() {
        let marks = Marks::default();
        for version in 0..MAX_REPORTED + 5 {
            marks.noticed(&service("web".to_owned(), version), Some("web".to_owned()));
        }
        let report = marks.begin().marks(0).marks;
        assert_eq!(report.len(), MAX_REPORTED);
        assert!(
            report[0].cause.as_ref().is_some_and(|cause| cause.version == "5"),
            "the oldest are left out"
        );
    }
}
