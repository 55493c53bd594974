//! How far one certificate of a pod has come. Pure: time is a parameter.
//!
//! ```text
//! Initial ──► Waiting ──► Fresh ◄──► Refreshing
//!                │                       │
//!                └───────► Refused ◄─────┘
//! ```

use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use skiff_api::certificates::pem;
use skiff_meta::field::quote;

/// So long after a refresh was due it is late.
const LATE: SignedDuration = SignedDuration::from_mins(10);

/// A key and its certificates, as PEM.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) key: Vec<u8>,
    pub(crate) chain: Vec<u8>,
}

/// A request that was made, and that nobody has answered yet.
pub(super) struct Pending {
    /// The key that the certificate will be for.
    pub(super) key: Vec<u8>,
    /// The name of the request.
    pub(super) name: String,
    pub(super) since: Timestamp,
}

/// A certificate that is in the pod.
pub(super) struct Issued {
    pub(super) credentials: Credentials,
    pub(super) refresh_at: Timestamp,
    not_after: Timestamp,
    /// Whether the pod's events tell of it.
    said_late: bool,
    said_expired: bool,
}

pub(super) enum State {
    /// Nothing was asked for yet.
    Initial,
    Waiting(Pending),
    Fresh(Issued),
    Refreshing(Issued, Pending),
    /// The signer said no, for good. The sentence says why.
    Refused {
        is_denied: bool,
        why: String,
    },
}

/// What a request came to.
pub(super) enum Outcome {
    Pending,
    Issued {
        chain: Vec<u8>,
        refresh_at: Timestamp,
        not_after: Timestamp,
    },
    Refused {
        is_denied: bool,
        reason: String,
        message: String,
    },
}

/// Reads what the signer wrote.
pub(super) fn outcome(request: &PodCertificateRequest) -> Outcome {
    let Some(status) = &request.status else {
        return Outcome::Pending;
    };
    for condition in status.conditions.iter().flatten() {
        match condition.type_.as_str() {
            kind @ ("Denied" | "Failed") => {
                return Outcome::Refused {
                    is_denied: kind == "Denied",
                    reason: condition.reason.clone(),
                    message: condition.message.clone(),
                };
            }
            "Issued" => {
                let (Some(refresh_at), Some(not_after)) = (&status.begin_refresh_at, &status.not_after)
                else {
                    return Outcome::Pending;
                };
                return Outcome::Issued {
                    chain: clean(status.certificate_chain.as_deref().unwrap_or_default()),
                    refresh_at: refresh_at.0,
                    not_after: not_after.0,
                };
            }
            _ => {}
        }
    }
    Outcome::Pending
}

/// A chain without what stands between its blocks and without their headers.
fn clean(chain: &str) -> Vec<u8> {
    let blocks = pem::blocks(chain);
    let text: String = blocks
        .iter()
        .map(|block| pem::certificate(&block.bytes))
        .collect();
    text.into_bytes()
}

impl State {
    /// What the pod gets now; the error is a sentence for the user.
    pub(super) fn credentials(&self) -> Result<Credentials, String> {
        match self {
            State::Initial | State::Waiting(_) => Err("credential bundle is not issued yet".to_owned()),
            State::Fresh(issued) | State::Refreshing(issued, _) => Ok(issued.credentials.clone()),
            State::Refused { why, .. } => Err(why.clone()),
        }
    }

    /// The request that is waited for.
    pub(super) fn pending(&self) -> Option<&Pending> {
        match self {
            State::Waiting(pending) | State::Refreshing(_, pending) => Some(pending),
            _ => None,
        }
    }

    /// Whether it is time to ask for a certificate.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        match self {
            State::Initial => true,
            State::Fresh(issued) => now >= issued.refresh_at,
            _ => false,
        }
    }

    fn take(&mut self) -> State {
        std::mem::replace(self, State::Initial)
    }

    /// A request was made.
    pub(super) fn asked(&mut self, pending: Pending) {
        *self = match self.take() {
            State::Fresh(issued) | State::Refreshing(issued, _) => State::Refreshing(issued, pending),
            _ => State::Waiting(pending),
        };
    }

    /// The request that was waited for is gone: another one is to be made.
    pub(super) fn lost(&mut self) {
        *self = match self.take() {
            State::Refreshing(issued, _) => State::Fresh(issued),
            State::Waiting(_) => State::Initial,
            other => other,
        };
    }

    /// The request that was waited for came to something. Whether the pod gets something else now.
    pub(super) fn settle(&mut self, outcome: Outcome, jitter: SignedDuration) -> bool {
        let key = match self.pending() {
            Some(pending) => pending.key.clone(),
            None => return false,
        };
        *self = match outcome {
            Outcome::Pending => return false,
            Outcome::Issued {
                chain,
                refresh_at,
                not_after,
            } => State::Fresh(Issued {
                credentials: Credentials { key, chain },
                refresh_at: refresh_at.checked_add(jitter).unwrap_or(refresh_at),
                not_after,
                said_late: false,
                said_expired: false,
            }),
            Outcome::Refused {
                is_denied,
                reason,
                message,
            } => {
                let verb = if is_denied { "denied" } else { "failed" };
                let why = format!(
                    "PodCertificateRequest was permanently {verb}: reason={} message={}",
                    quote(&reason),
                    quote(&message)
                );
                State::Refused { is_denied, why }
            }
        };
        true
    }

    /// Reason and message of the events that are due, each once a certificate.
    pub(super) fn warnings(&mut self, now: Timestamp) -> Vec<(&'static str, &'static str)> {
        let (State::Fresh(issued) | State::Refreshing(issued, _)) = self else {
            return Vec::new();
        };
        let mut due = Vec::new();
        if issued.is_late(now) && !std::mem::replace(&mut issued.said_late, true) {
            due.push(("CertificateOverdueForRefresh", "PodCertificate refresh overdue"));
        }
        if now > issued.not_after && !std::mem::replace(&mut issued.said_expired, true) {
            due.push(("CertificateExpired", "PodCertificate expired"));
        }
        due
    }

    /// As the metric shows it.
    pub(super) fn name(&self, now: Timestamp) -> &'static str {
        match self {
            State::Initial | State::Waiting(_) => "not_yet_issued",
            State::Refused { is_denied: true, .. } => "denied",
            State::Refused { is_denied: false, .. } => "failed",
            State::Fresh(issued) | State::Refreshing(issued, _) if now > issued.not_after => "expired",
            State::Fresh(issued) | State::Refreshing(issued, _) if issued.is_late(now) => {
                "overdue_for_refresh"
            }
            State::Fresh(_) | State::Refreshing(..) => "fresh",
        }
    }
}

impl Issued {
    fn is_late(&self, now: Timestamp) -> bool {
        now.duration_since(self.refresh_at) > LATE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(minute: i64) -> Timestamp {
        Timestamp::from_second(minute * 60).unwrap()
    }

    fn pending(name: &str) -> Pending {
        Pending {
            key: name.as_bytes().to_vec(),
            name: name.to_owned(),
            since: at(0),
        }
    }

    fn answered(status: Value) -> Outcome {
        let request = json!({"metadata": {"name": "r"}, "spec": {
            "signerName": "s", "podName": "", "podUID": "", "serviceAccountName": "", "serviceAccountUID": "",
            "nodeName": "", "nodeUID": "", "stubPKCS10Request": ""}, "status": status});
        outcome(&serde_json::from_value(request).unwrap())
    }

    fn decided(kind: &str) -> Value {
        json!([{"type": kind, "status": "True", "reason": "Because", "message": "of \"it\"",
            "lastTransitionTime": "1970-01-01T00:00:00Z"}])
    }

    fn issued() -> Outcome {
        answered(json!({"conditions": decided("Issued"),
            "certificateChain": "words\n-----BEGIN CERTIFICATE-----\nx: y\n\nYQ==\n-----END CERTIFICATE-----\n",
            "notBefore": "1970-01-01T00:00:00Z", "beginRefreshAt": "1970-01-01T01:00:00Z", "notAfter": "1970-01-01T02:00:00Z"}))
    }

    #[test]
    fn a_certificate_is_asked_for_and_refreshed() {
        let none = SignedDuration::ZERO;
        let mut state = State::Initial;
        assert!(state.is_due(at(0)) && state.credentials().is_err());
        state.asked(pending("first"));
        assert_eq!(state.name(at(0)), "not_yet_issued");
        assert!(!state.is_due(at(0)) && !state.settle(answered(json!({})), none));
        assert!(state.settle(issued(), SignedDuration::from_mins(1)));
        let found = state.credentials().unwrap();
        assert_eq!(found.key, b"first");
        assert_eq!(
            found.chain,
            b"-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n"
        );
        assert!(!state.is_due(at(60)) && state.is_due(at(61)));
        assert_eq!(state.name(at(61)), "fresh");
        state.asked(pending("second"));
        assert!(!state.is_due(at(61)));
        assert_eq!(state.credentials().unwrap().key, b"first");
        assert!(state.settle(issued(), none));
        assert_eq!(state.credentials().unwrap().key, b"second");
    }

    #[test]
    fn what_is_late_is_said_once() {
        let mut state = State::Initial;
        assert!(state.warnings(at(0)).is_empty());
        state.asked(pending("first"));
        state.settle(issued(), SignedDuration::ZERO);
        state.asked(pending("second"));
        assert!(state.warnings(at(70)).is_empty());
        let late = ("CertificateOverdueForRefresh", "PodCertificate refresh overdue");
        assert_eq!(state.warnings(at(71)), [late]);
        assert_eq!(state.name(at(71)), "overdue_for_refresh");
        assert!(state.warnings(at(72)).is_empty());
        let expired = ("CertificateExpired", "PodCertificate expired");
        assert_eq!(state.warnings(at(121)), [expired]);
        assert_eq!(state.name(at(121)), "expired");
        // Another request, and nothing is forgotten.
        state.lost();
        assert!(state.is_due(at(121)) && state.warnings(at(121)).is_empty());
    }

    #[test]
    fn a_signer_says_no() {
        for (kind, name) in [("Denied", "denied"), ("Failed", "failed")] {
            let mut state = State::Initial;
            state.asked(pending("first"));
            state.lost();
            assert!(state.is_due(at(0)));
            state.asked(pending("second"));
            assert!(state.settle(
                answered(json!({"conditions": decided(kind)})),
                SignedDuration::ZERO
            ));
            assert_eq!(state.name(at(0)), name);
            let why = format!(
                "PodCertificateRequest was permanently {name}: reason=\"Because\" message=\"of \\\"it\\\"\""
            );
            assert_eq!(state.credentials().err(), Some(why));
            assert!(!state.is_due(at(10_000)) && !state.settle(issued(), SignedDuration::ZERO));
        }
    }
}
