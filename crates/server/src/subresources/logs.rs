//! `pods/log`: the kubelet's container log, passed through.

use std::sync::Arc;

use futures::FutureExt;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;
use skiff_meta::{GroupKind, Status, field};
use skiff_registry::{ReadAt, Resource, object};

use super::connect;
use crate::body::{self, Answer};
use crate::chain::Exchange;
use crate::query::Query;
use crate::server::Inner;

/// The options that the kubelet understands too.
const OPTIONS: [&str; 8] = [
    "follow",
    "previous",
    "sinceSeconds",
    "sinceTime",
    "timestamps",
    "tailLines",
    "limitBytes",
    "stream",
];

/// How much of a kubelet's refusal is quoted.
const QUOTED_BYTES: usize = 50_000;

pub async fn get(inner: &Arc<Inner>, exchange: &Exchange, resource: &Resource) -> Result<Answer, Status> {
    let info = &exchange.info;
    check_options(&exchange.query, &info.name)?;
    let found = inner
        .registry
        .get(resource, &info.namespace, &info.name, ReadAt::Latest)
        .await?;
    let pod = found.ok_or_else(|| Status::not_found(&resource.group_resource, &info.name))?;
    let container = container_of(&pod, exchange.query.text("container"))?;
    let node = object::at_str(&pod, &["spec", "nodeName"]);
    if node.is_empty() {
        // COMPAT: a pod without a node has an empty log, not an error.
        return Ok(body::empty(StatusCode::NO_CONTENT));
    }
    let mut query = Vec::new();
    for option in OPTIONS {
        if let Some(value) = exchange.query.get(option) {
            query.push(format!("{option}={}", connect::escape(value)));
        }
    }
    let path = format!(
        "/containerLogs/{}/{}/{container}?{}",
        info.namespace,
        info.name,
        query.join("&")
    );
    let mut upgrade = Request::new(());
    *upgrade.headers_mut() = exchange.parts.headers.clone();
    if !skiff_streaming::is_upgrade_request(&upgrade) {
        let answer = connect::to_kubelet(inner, exchange, node, &path, body::full("")).await?;
        return check_answer(answer).await;
    }
    // Browsers follow a log over WebSocket; the kubelet speaks plain HTTP.
    let answer = connect::to_kubelet_plain(inner, exchange, node, &path).await?;
    let answer = check_answer(answer).await?;
    *upgrade.extensions_mut() = exchange.parts.extensions.clone();
    Ok(skiff_streaming::serve_reader(upgrade, answer.into_body()))
}

/// A kubelet refuses in plain text, clients expect a `Status`.
async fn check_answer(answer: Answer) -> Result<Answer, Status> {
    let code = answer.status();
    if code.is_success() {
        return Ok(answer);
    }
    // Boxed: the compiler cannot show that the bare future may move between threads.
    let body = Limited::new(answer.into_body(), QUOTED_BYTES).collect().boxed();
    let text = match body.await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(_) => "the kubelet's answer cannot be read".to_owned(),
    };
    Err(match code {
        StatusCode::BAD_REQUEST => Status::bad_request(text),
        StatusCode::INTERNAL_SERVER_ERROR => Status::internal(text),
        StatusCode::FORBIDDEN => Status::failure(403, "Forbidden", text),
        StatusCode::NOT_FOUND => Status::failure(404, "NotFound", text),
        StatusCode::SERVICE_UNAVAILABLE => Status::service_unavailable(text),
        other => Status::failure(other.as_u16(), "Unknown", text),
    })
}

/// Where Go's parser stops in what is no time: at what is left, for want of which part of its layout.
fn time_fault(text: &str) -> (&str, &'static str) {
    let mut rest = text;
    for part in ["2006", "-", "01", "-", "02", "T", "15", ":", "04", ":", "05"] {
        let digits = part.as_bytes()[0].is_ascii_digit();
        let fits = |found: &str| {
            if digits {
                found.bytes().all(|byte| byte.is_ascii_digit())
            } else {
                found == part
            }
        };
        match rest.get(..part.len()).filter(|found| fits(found)) {
            Some(found) => rest = &rest[found.len()..],
            None => return (rest, part),
        }
    }
    (rest, "Z07:00")
}

/// The rules of the options, which come as text.
fn check_options(query: &Query, name: &str) -> Result<(), Status> {
    if let Some(text) = query.get("sinceTime")
        && skiff_meta::time::parse(text).is_none()
    {
        let (rest, part) = time_fault(text);
        let (text, rest) = (field::quote(text), field::quote(rest));
        return Err(Status::bad_request(format!(
            "parsing time {text} as \"2006-01-02T15:04:05Z07:00\": cannot parse {rest} as \"{part}\""
        )));
    }
    for option in ["tailLines", "limitBytes", "sinceSeconds"] {
        query.number(option)?;
    }
    let mut found = Vec::new();
    let mut least = |option: &'static str, least: i64, why: &str| {
        if let Some(number) = query.get(option).and_then(|text| text.parse::<i64>().ok())
            && number < least
        {
            found.push(field::Error::invalid(&field::Path::new(option), number, why));
        }
    };
    least("tailLines", 0, "must be greater than or equal to 0");
    least("limitBytes", 1, "must be greater than 0");
    least("sinceSeconds", 1, "must be greater than 0");
    let both = ["sinceSeconds", "sinceTime"]
        .iter()
        .all(|option| query.get(option).is_some());
    if both {
        // COMPAT: upstream prints a path of no parts so.
        let path = field::Path::new("[]");
        found.push(field::Error::forbidden(
            &path,
            "at most one of `sinceTime` or `sinceSeconds` may be specified",
        ));
    }
    if query.get("stream").is_some() {
        let path = field::Path::new("stream");
        found.push(field::Error::forbidden(&path, "may not be specified"));
    }
    if found.is_empty() {
        return Ok(());
    }
    Err(Status::invalid(
        &GroupKind::new("", "PodLogOptions"),
        name,
        &found,
    ))
}

/// The container that is meant: the one named, the one annotated, or the only one.
pub fn container_of(pod: &Value, asked: &str) -> Result<String, Status> {
    let names = |list: &str| -> Vec<String> {
        object::at(pod, &["spec", list])
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|container| container["name"].as_str().map(str::to_string))
            .collect()
    };
    let (containers, init, ephemeral) = (
        names("containers"),
        names("initContainers"),
        names("ephemeralContainers"),
    );
    let pod_name = object::name(pod);
    let annotated = object::at_str(
        pod,
        &[
            "metadata",
            "annotations",
            "kubectl.kubernetes.io/default-container",
        ],
    );
    let asked = if asked.is_empty() { annotated } else { asked };
    if asked.is_empty() {
        if let [only] = containers.as_slice() {
            return Ok(only.clone());
        }
        let mut message = format!(
            "a container name must be specified for pod {pod_name}, choose one of: [{}]",
            containers.join(" ")
        );
        if !init.is_empty() {
            message.push_str(&format!(" or one of the init containers: [{}]", init.join(" ")));
        }
        return Err(Status::bad_request(message));
    }
    if [&containers, &init, &ephemeral]
        .iter()
        .any(|names| names.iter().any(|name| name == asked))
    {
        return Ok(asked.to_string());
    }
    Err(Status::bad_request(format!(
        "container {asked} is not valid for pod {pod_name}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn containers() {
        let one = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}]}});
        let two = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]}});
        let check = |pod: &Value, asked: &str, expected: Result<&str, &str>| {
            let got = container_of(pod, asked).map_err(|status| status.message);
            assert_eq!(got, expected.map(str::to_string).map_err(str::to_string));
        };
        check(&one, "", Ok("a"));
        check(&two, "i", Ok("i"));
        check(
            &two,
            "",
            Err(
                "a container name must be specified for pod p, choose one of: [a b] or one of the init containers: [i]",
            ),
        );
        check(&two, "x", Err("container x is not valid for pod p"));
    }
}
