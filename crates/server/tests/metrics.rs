//! `/metrics`: what is counted, under which names, and that no client can make it grow.

mod support;

use serde_json::json;
use skiff_auth::UserInfo;
use support::Cluster;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// The value of the one line that starts with the name and holds all the labels.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let found: Vec<&str> = text
        .lines()
        .filter(|line| {
            line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label))
        })
        .collect();
    assert!(
        found.len() <= 1,
        "{name} {labels:?} is not one series: {found:#?}"
    );
    found.first()?.rsplit_once(' ')?.1.parse().ok()
}

#[tokio::test]
async fn requests_are_counted_under_upstreams_labels() {
    let cluster = Cluster::start().await;
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}});
    assert_eq!(cluster.post(MAPS, map.clone()).await.code, 201);
    assert_eq!(
        cluster
            .post(&format!("{MAPS}?dryRun=All"), map.clone())
            .await
            .code,
        409
    );
    assert_eq!(cluster.get(MAPS).await.code, 200);
    assert_eq!(cluster.get("/api/v1/configmaps").await.code, 200);
    assert_eq!(cluster.get(&format!("{MAPS}/one")).await.code, 200);
    let apply = [("content-type", "application/apply-patch+yaml")];
    let path = format!("{MAPS}/one?fieldManager=me");
    let applied = cluster
        .send_as(cluster.admin(), "PATCH", &path, &apply, map.to_string())
        .await;
    assert_eq!(applied.code, 200, "{}", applied.text);
    let merge = [("content-type", "application/merge-patch+json")];
    let patched = cluster
        .send_as(cluster.admin(), "PATCH", &format!("{MAPS}/one"), &merge, "{}")
        .await;
    assert_eq!(patched.code, 200);
    let selected = format!("{MAPS}?fieldSelector=metadata.name%3Done");
    assert_eq!(cluster.get(&selected).await.code, 200);
    assert_eq!(cluster.delete(MAPS, json!({})).await.code, 200);
    let nobody = cluster.server.service(UserInfo::anonymous());
    assert_eq!(
        cluster
            .send_as(nobody, "GET", "/api/v1/secrets", &[], "")
            .await
            .code,
        403
    );

    let text = cluster.get("/metrics").await.text;
    let of_maps = |verb: &str, scope: &str, code: &str| {
        let labels = [
            "resource=\"configmaps\"",
            "group=\"\"",
            "version=\"v1\"",
            "subresource=\"\"",
            "component=\"apiserver\"",
            &format!("verb=\"{verb}\""),
            &format!("scope=\"{scope}\""),
            &format!("code=\"{code}\""),
        ];
        value(&text, "apiserver_request_total", &labels)
    };
    // A POST is of one resource, whatever its path; an apply is no PATCH.
    for (verb, scope, code) in [
        ("DELETE", "namespace", "200"),
        ("POST", "resource", "201"),
        ("POST", "resource", "409"),
        ("LIST", "cluster", "200"),
        ("GET", "resource", "200"),
        ("APPLY", "resource", "200"),
        ("PATCH", "resource", "200"),
    ] {
        assert_eq!(
            of_maps(verb, scope, code),
            Some(1.0),
            "{verb} {scope} {code}\n{text}"
        );
    }
    assert_eq!(
        of_maps("LIST", "namespace", "200"),
        Some(2.0),
        "one selects a name"
    );
    let refused = [
        "code=\"403\"",
        "verb=\"LIST\"",
        "scope=\"cluster\"",
        ",resource=\"\"",
    ];
    assert_eq!(value(&text, "apiserver_request_total", &refused), Some(1.0));
    let refused = ["verb=\"LIST\"", ",resource=\"\""];
    let took = value(&text, "apiserver_request_sli_duration_seconds_count", &refused);
    assert_eq!(took, None, "a refusal has no duration");
    for name in [
        "apiserver_request_duration_seconds_count",
        "apiserver_request_sli_duration_seconds_count",
    ] {
        let labels = ["resource=\"configmaps\"", "verb=\"GET\"", "scope=\"resource\""];
        assert_eq!(value(&text, name, &labels), Some(1.0), "{name}");
    }
    // The buckets that alerts and recording rules name.
    for bound in ["0.05", "0.4", "1", "5", "30", "+Inf"] {
        let labels = [
            "resource=\"configmaps\"",
            "verb=\"GET\"",
            &format!("le=\"{bound}\""),
        ];
        let found = value(&text, "apiserver_request_sli_duration_seconds_bucket", &labels);
        assert!(found.is_some(), "{bound}");
    }
    assert!(
        text.contains("\nkubernetes_build_info{git_version=\"v1.36"),
        "{text}"
    );
    assert!(text.contains("\napiserver_current_inflight_requests{request_kind=\"readOnly\"} 1\n"));
}

#[tokio::test]
async fn a_watch_is_counted_while_it_is_open() {
    let cluster = Cluster::start().await;
    let open = async || {
        let text = cluster.get("/metrics").await.text;
        value(
            &text,
            "apiserver_longrunning_requests",
            &["resource=\"configmaps\"", "verb=\"WATCH\""],
        )
    };
    assert_eq!(open().await, None);
    let watch = cluster.watch(&format!("{MAPS}?watch=1")).await;
    assert_eq!(open().await, Some(1.0));
    drop(watch);
    assert_eq!(open().await, Some(0.0));
}

#[tokio::test]
async fn names_that_clients_invent_do_not_grow_the_metrics() {
    let cluster = Cluster::start().await;
    let long = "x".repeat(20_000);
    let nobody = || cluster.server.service(UserInfo::anonymous());
    let storm = async |from: usize, count: usize| {
        for number in from..from + count {
            for (user, method, path) in [
                // Refused, by who asks.
                (
                    nobody(),
                    "GET",
                    format!("/api/v1/namespaces/default/{long}{number}"),
                ),
                (
                    nobody(),
                    "GET",
                    format!("/apis/{long}{number}/v1/namespaces/default/pods/x/{long}"),
                ),
                (nobody(), "POST", format!("/apis/apps/{long}{number}/deployments")),
                (nobody(), "GET", format!("/{long}{number}")),
                // Allowed, but there is no such thing.
                (
                    cluster.admin(),
                    "GET",
                    format!("/api/v1/namespaces/default/no{number}"),
                ),
                (
                    cluster.admin(),
                    "GET",
                    format!("/api/v1/namespaces/default/pods/x/no{number}"),
                ),
                (cluster.admin(), "PUT", format!("/apis/no{number}/v1/things/x")),
                (cluster.admin(), "GET", format!("/no{number}")),
                (cluster.admin(), "GET", format!("{MAPS}/no{number}")),
                // No method that anybody knows.
                (cluster.admin(), &*format!("M{number}"), format!("{MAPS}/x")),
            ] {
                cluster.send_as(user, method, &path, &[], "").await;
            }
        }
        cluster.get("/metrics").await.text
    };
    storm(0, 1).await;
    let first = storm(1, 1).await;
    let last = storm(2, 60).await;
    assert!(
        !last.contains("xxxx") && !last.contains("no1"),
        "a name that a client invented"
    );
    // Supervised tasks are counted by process, and so are those of the servers of other tests.
    let lines = |text: &str| text.lines().filter(|line| !line.contains("skiff_task")).count();
    assert_eq!(lines(&first), lines(&last), "series were added");
    assert!(
        last.len() < first.len() + 1_000,
        "{} to {}",
        first.len(),
        last.len()
    );
}

#[tokio::test]
async fn requests_that_take_too_long_and_certificates_are_counted() {
    let cluster = Cluster::start().await;
    let frames =
        futures::stream::pending::<Result<http_body::Frame<bytes::Bytes>, std::convert::Infallible>>();
    let request = http::Request::post(format!("{MAPS}?timeout=50ms"))
        .header("content-type", "application/json")
        .body(http_body_util::StreamBody::new(frames))
        .expect("a request");
    let answer = tower::ServiceExt::oneshot(cluster.admin(), request).await;
    assert_eq!(answer.expect("answers").status(), 504);
    let https = support::Https::open(&cluster).await;
    let identity = cluster.pki.client("jane", "jane", None).expect("a certificate");
    let mut stream = https.connect(&cluster, Some(&identity), "http/1.1").await;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let asked = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(asked).await.expect("is sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(
        answer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    https.end().await;

    let text = cluster.get("/metrics").await.text;
    let labels = [
        "code=\"504\"",
        "verb=\"POST\"",
        "resource=\"configmaps\"",
        "scope=\"resource\"",
    ];
    assert_eq!(
        value(&text, "apiserver_request_terminations_total", &labels),
        Some(1.0)
    );
    assert!(
        text.contains("\napiserver_client_certificate_expiration_seconds_count 1\n"),
        "{text}"
    );
    // What is valid for longer than a day is in no bucket below.
    let day = value(
        &text,
        "apiserver_client_certificate_expiration_seconds_bucket",
        &["le=\"86400\""],
    );
    assert_eq!(day, Some(0.0));
}
