//! What requests may hold altogether: more large bodies than fit are refused, small ones get through.

mod support;

use bytes::Bytes;
use http::Request;
use http_body_util::StreamBody;
use serde_json::json;
use skiff_auth::UserInfo;
use support::Cluster;
use tower::ServiceExt;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const MIB: usize = 1 << 20;

/// A body of 2 MiB that never ends.
fn endless() -> impl http_body::Body<Data = Bytes, Error = std::convert::Infallible> {
    use futures::StreamExt;
    let part = Bytes::from(vec![b' '; MIB / 2]);
    let parts = futures::stream::repeat(part)
        .take(4)
        .map(|part| Ok(http_body::Frame::data(part)));
    StreamBody::new(parts.chain(futures::stream::pending()))
}

async fn bodies_in_flight_have_a_budget() {
    let cluster = Cluster::start().await;
    let mut waiting = Vec::new();
    let mut refused = 0;
    for _ in 0..100 {
        let request = Request::post(MAPS)
            .header("content-type", "application/json")
            .body(endless())
            .expect("a request");
        let mut sent = Box::pin(cluster.admin().oneshot(request));
        // All that came is read at once; then it waits for more, or is refused.
        match futures::poll!(&mut sent) {
            std::task::Poll::Pending => waiting.push(sent),
            std::task::Poll::Ready(answer) => {
                let answer = answer.expect("answers");
                assert_eq!(answer.status(), 429);
                assert_eq!(answer.headers()["retry-after"], "1");
                refused += 1;
            }
        }
    }
    assert!(
        (50..70).contains(&waiting.len()),
        "{} hold 2 MiB each",
        waiting.len()
    );
    assert_eq!(waiting.len() + refused, 100);
    let map = |name: &str, size: usize| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"x": "x".repeat(size)}});
    assert_eq!(
        cluster.post(MAPS, map("small", 1000)).await.code,
        201,
        "small ones get through"
    );
    drop(waiting);
    assert_eq!(
        cluster.post(MAPS, map("large", MIB / 2)).await.code,
        201,
        "what is dropped comes back"
    );
}

/// In a row, because the budgets are those of the process.
#[tokio::test]
async fn what_requests_hold_has_a_budget() {
    bodies_in_flight_have_a_budget().await;
    heads_in_flight_have_a_budget().await;
    marks_of_refused_requests_do_not_grow().await;
    definitions_that_came_and_went_have_a_budget().await;
}

/// The last cluster of this process: none after it serves a definition with a new name.
async fn definitions_that_came_and_went_have_a_budget() {
    const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let cluster = Cluster::start().await;
    let categories: Vec<String> = (0..6_000)
        .map(|number| format!("x{number}{}", "x".repeat(55)))
        .collect();
    let mut last = None;
    for number in 0..100 {
        let plural = format!("things{number}");
        let made = cluster
            .post(
                DEFINITIONS,
                json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                    "metadata": {"name": format!("{plural}.example.com")},
                    "spec": {"group": "example.com", "scope": "Cluster",
                        "names": {"plural": plural, "kind": format!("Thing{number}"), "categories": categories},
                        "versions": [{"name": "v1", "served": true, "storage": true,
                            "schema": {"openAPIV3Schema": {"type": "object"}}}]}}),
            )
            .await;
        assert_eq!(made.code, 201, "{plural}");
        let own = format!("{DEFINITIONS}/{plural}.example.com");
        let established = loop {
            let found = cluster.get(&own).await.json;
            let conditions = found["status"]["conditions"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            let established = conditions.into_iter().find(|one| one["type"] == "Established");
            match established {
                // It is not, until its names are accepted.
                Some(one) if one["status"] == "True" || one["reason"] == "NoRoom" => break one,
                _ => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        };
        let served = format!("/apis/example.com/v1/{plural}");
        if established["status"] == "True" {
            assert_eq!(cluster.get(&served).await.code, 200);
            cluster.delete(&own, json!({})).await;
        } else {
            assert_eq!(cluster.get(&served).await.code, 404);
            last = Some(number);
            break;
        }
    }
    assert!(
        last.is_some_and(|number| number > 10),
        "the budget is never reached: {last:?}"
    );
}

async fn heads_in_flight_have_a_budget() {
    let cluster = Cluster::start().await;
    let long = "x".repeat(200_000);
    let mut waiting = Vec::new();
    let mut refused = 0;
    for _ in 0..400 {
        let frames = futures::stream::pending::<Result<http_body::Frame<Bytes>, std::convert::Infallible>>();
        let request = Request::post(MAPS)
            .header("content-type", "application/json")
            .header("x-long", &long)
            .body(StreamBody::new(frames))
            .expect("a request");
        let mut sent = Box::pin(cluster.admin().oneshot(request));
        match futures::poll!(&mut sent) {
            std::task::Poll::Pending => waiting.push(sent),
            std::task::Poll::Ready(answer) => {
                assert_eq!(answer.expect("answers").status(), 429);
                refused += 1;
            }
        }
    }
    assert!(
        (300..340).contains(&waiting.len()),
        "{} hold 200 kB each",
        waiting.len()
    );
    assert_eq!(waiting.len() + refused, 400);
    assert_eq!(cluster.get("/version").await.code, 200, "small ones get through");
    drop(waiting);
    let headers = [("x-long", long.as_str())];
    assert_eq!(
        cluster
            .send_as(cluster.admin(), "GET", "/version", &headers, "")
            .await
            .code,
        200
    );
}

async fn marks_of_refused_requests_do_not_grow() {
    let cluster = Cluster::start().await;
    let long = "x".repeat(30_000);
    let nobody = || cluster.server.service(UserInfo::anonymous());
    for number in 0..150 {
        let path = format!("/apis/{long}/v1/namespaces/{number}{long}/things/x");
        assert_eq!(cluster.send_as(nobody(), "PUT", &path, &[], "").await.code, 403);
    }
    let marks = cluster.get("/debug/skiff/trace").await.text;
    assert!(marks.len() < 3 * MIB, "{}", marks.len());
    // Heads of that size are let go of with their requests.
    assert_eq!(cluster.get("/version").await.code, 200);
}
