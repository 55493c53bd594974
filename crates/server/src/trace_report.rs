//! `POST /debug/skiff/trace`: the marks of work that ends in no write to the API, such as the service proxy's rules in
//! the kernel. The sender says what it did and when; who the sender is, the server says. A report cannot claim to be a
//! write to a resource: only the chain makes such marks.

use std::sync::Arc;

use http::StatusCode;
use skiff_meta::Status;
use skiff_trace::{MAX_REPORTED, Mark, Marks, SERVICE_RULES};

use crate::body::{self, Answer, Body};
use crate::chain::Exchange;
use crate::server::Inner;

pub async fn record(inner: &Arc<Inner>, exchange: &Exchange, request_body: Body) -> Result<Answer, Status> {
    let arrived_us = skiff_trace::now_us();
    let bytes = body::read(request_body).await?;
    for mark in accept(&bytes, &exchange.user.name, arrived_us)? {
        inner.recorder.record(mark);
    }
    Ok(body::empty(StatusCode::NO_CONTENT))
}

fn accept(bytes: &[u8], user: &str, arrived_us: i64) -> Result<Vec<Mark>, Status> {
    let Marks { marks, now_us } = serde_json::from_slice(bytes)
        .map_err(|error| Status::bad_request(format!("the marks cannot be decoded: {error}")))?;
    if marks.len() > MAX_REPORTED {
        return Err(Status::bad_request(format!(
            "{} marks in one report, at most {MAX_REPORTED} are accepted",
            marks.len()
        )));
    }
    if let Some(mark) = marks.iter().find(|mark| mark.resource != SERVICE_RULES) {
        return Err(Status::bad_request(format!(
            "marks of {:?} are made by the server only",
            mark.resource
        )));
    }
    let accepted = marks.into_iter().map(|mark| Mark {
        user: user.to_owned(),
        subresource: String::new(),
        resource_version: String::new(),
        code: 200,
        stages: Vec::new(),
        behind_us: now_us.map(|sent| arrived_us.saturating_sub(sent)),
        server: String::new(),
        ..mark
    });
    Ok(accepted.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_report_is_no_write_and_names_no_other_user() {
        let check = |report: serde_json::Value, expected: Result<usize, &str>| {
            let accepted = accept(report.to_string().as_bytes(), "system:kube-proxy", 1_000);
            match (accepted, expected) {
                (Ok(marks), Ok(count)) => {
                    assert_eq!(marks.len(), count);
                    assert!(marks.iter().all(|mark| mark.user == "system:kube-proxy"
                        && mark.code == 200
                        && mark.resource_version.is_empty()));
                }
                (Err(status), Err(part)) => {
                    assert!(status.message.contains(part), "{}", status.message);
                }
                (accepted, expected) => panic!("{report}: {accepted:?}, expected {expected:?}"),
            }
        };
        let rules = json!({"resource": SERVICE_RULES, "name": "web", "user": "kubernetes-admin", "resourceVersion": "7"});
        check(json!({"marks": [rules]}), Ok(1));
        check(json!({"marks": []}), Ok(0));
        let report = json!({"marks": [rules], "nowUs": 400}).to_string();
        let accepted = accept(report.as_bytes(), "system:kube-proxy", 1_000).unwrap();
        assert_eq!(accepted[0].behind_us, Some(600));
        check(
            json!({"marks": [{"resource": "pods", "name": "p"}]}),
            Err("made by the server only"),
        );
        check(
            json!({"marks": vec![rules; MAX_REPORTED + 1]}),
            Err("at most 256"),
        );
        check(json!([1]), Err("cannot be decoded"));
    }
}
