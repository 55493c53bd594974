//! Paths through made-up marks.

use super::*;

fn mark(object: (&str, &str, &str), start_us: i64, dur_us: i64, cause: Option<&str>) -> Mark {
    Mark {
        start_us,
        dur_us,
        user: "u".into(),
        verb: "create".into(),
        resource: object.0.into(),
        subresource: String::new(),
        namespace: "default".into(),
        name: object.1.into(),
        uid: String::new(),
        resource_version: object.2.into(),
        code: 201,
        cause: cause.map(|c| c.parse().unwrap()),
        client_stages: vec![],
        ..Mark::default()
    }
}

fn ask(marks: &[Mark], resource: &str, name: &str, ends: &[&str]) -> Option<Waterfall> {
    let question = Question {
        resource,
        namespace: "default",
        name,
        ends,
        last: None,
    };
    waterfall(marks, &question)
}

fn example() -> Vec<Mark> {
    let mut pod = mark(
        ("pods", "web-1", "4"),
        5_000,
        500,
        Some("replicasets.apps/default/web@3"),
    );
    pod.client_stages = vec![Stage {
        name: "queue".into(),
        start_us: 3_500,
        dur_us: 500,
    }];
    vec![
        mark(("deployments.apps", "web", "1"), 0, 1, None),
        mark(("deployments.apps", "web", "2"), 1_000, 1_000, None),
        mark(("configmaps", "other", "9"), 1_500, 10, None),
        mark(
            ("replicasets.apps", "web", "3"),
            2_500,
            500,
            Some("deployments.apps/default/web@2"),
        ),
        pod,
        mark(("events", "e", "5"), 9_000, 500, Some("pods/default/web-1@4")),
    ]
}

#[test]
fn steps_add_up_to_the_wall_clock() {
    let marks = example();
    let found = ask(&marks, "deployments.apps", "web", &["pods"]).unwrap();
    assert_eq!(found.total_us, 4_500);
    assert_eq!(found.steps.iter().map(|s| s.dur_us).sum::<i64>(), found.total_us);
    let mut at = 0;
    for step in &found.steps {
        assert_eq!(step.start_us, at);
        at += step.dur_us;
    }
    let whats: Vec<&str> = found.steps.iter().map(|s| s.what.as_str()).collect();
    assert_eq!(
        whats,
        [
            "create deployments.apps web",
            "watch event, own work",
            "create replicasets.apps web",
            "watch event",
            "queue",
            "own work",
            "create pods web-1"
        ]
    );
    assert_eq!(found.writes, 4);
    assert!(!found.complete);
}

#[test]
fn without_an_end_the_path_runs_to_the_last_write() {
    let found = ask(&example(), "deployments.apps", "web", &["nothing"]).unwrap();
    assert_eq!(found.total_us, 8_500);
    assert!(ask(&example(), "pods", "missing", &[]).is_none());
}

/// Three replicas, two of them ready at once, the third later; then a probe flaps an hour after.
fn rollout() -> Vec<Mark> {
    let hour = 3_600_000_000;
    let slice = "endpointslices.discovery.k8s.io";
    let status = |mut mark: Mark, complete: bool| {
        mark.subresource = "status".into();
        mark.user = "system:serviceaccount:kube-system:c".into();
        if complete {
            mark.client_stages.push(Stage {
                name: COMPLETE.into(),
                start_us: mark.start_us,
                dur_us: 0,
            });
        }
        mark
    };
    let (dep, set) = ("deployments.apps", "replicasets.apps");
    let mut marks = vec![
        mark((dep, "web", "10"), 0, 100, None),
        mark(
            (set, "web-1", "11"),
            200,
            100,
            Some("deployments.apps/default/web@10"),
        ),
    ];
    for (n, at) in [(1, 400), (2, 410), (3, 420)] {
        let name = format!("p{n}");
        let made = |version: i32| format!("pods/default/{name}@{version}");
        let (created, bound, waiting, ready) = (n * 100, n * 100 + 1, n * 100 + 2, n * 100 + 3);
        let later = if n == 3 { 50_000 } else { 5_000 };
        marks.push(mark(
            ("pods", &name, &created.to_string()),
            at,
            50,
            Some("replicasets.apps/default/web-1@11"),
        ));
        marks.push(mark(
            ("pods", &name, &bound.to_string()),
            at + 200,
            50,
            Some(&made(created)),
        ));
        let node = |version: i32, at, cause: i32| {
            status(
                mark(("pods", &name, &version.to_string()), at, 50, Some(&made(cause))),
                false,
            )
        };
        marks.push(node(waiting, at + 1_000, bound));
        marks.push(node(ready, at + later, waiting));
        // The endpoint appears, not ready yet, and then becomes ready.
        marks.push(mark(
            (slice, "web", &format!("{n}90")),
            at + 1_500,
            50,
            Some(&made(waiting)),
        ));
        marks.push(mark(
            (slice, "web", &format!("{n}91")),
            at + later + 300,
            50,
            Some(&made(ready)),
        ));
        let counted = format!("{n}80");
        marks.push(status(
            mark((set, "web-1", &counted), at + later + 80, 50, Some(&made(ready))),
            false,
        ));
        let cause = format!("replicasets.apps/default/web-1@{counted}");
        marks.push(status(
            mark(
                (dep, "web", &format!("{n}81")),
                at + later + 150,
                50,
                Some(&cause),
            ),
            n == 3,
        ));
        if n == 1 {
            // Woken by a version and changing nothing: it answers with the version that woke it.
            marks.push(status(
                mark(
                    (dep, "web", "10"),
                    300,
                    50,
                    Some("deployments.apps/default/web@10"),
                ),
                false,
            ));
            // A look at the clock, without a cause.
            let mut by_clock = mark((dep, "web", "183"), 9_000, 10, None);
            by_clock.user = "system:serviceaccount:kube-system:deployment-controller".into();
            marks.push(by_clock);
        }
    }
    let flap = status(
        mark(("pods", "p1", "900"), hour, 50, Some("pods/default/p1@103")),
        false,
    );
    marks.push(flap);
    marks.push(mark(
        (slice, "web", "901"),
        hour + 300,
        50,
        Some("pods/default/p1@900"),
    ));
    marks
}

#[test]
fn the_path_ends_when_the_last_replica_is_served() {
    let mut marks = rollout();
    let check = |marks: &[Mark]| {
        let found = ask(
            marks,
            "deployments.apps",
            "web",
            &["endpointslices.discovery.k8s.io"],
        )
        .unwrap();
        let whats: Vec<&str> = found
            .steps
            .iter()
            .map(|s| s.what.as_str())
            .filter(|w| w.starts_with("create"))
            .collect();
        assert_eq!(
            whats,
            [
                "create deployments.apps web",
                "create replicasets.apps web-1",
                "create pods p3",
                "create pods p3",
                "create pods/status p3",
                "create pods/status p3",
                "create endpointslices.discovery.k8s.io web"
            ]
        );
        assert_eq!(found.total_us, 420 + 50_000 + 300 + 50);
        assert_eq!(found.steps.iter().map(|s| s.dur_us).sum::<i64>(), found.total_us);
        assert_eq!(
            found.writes,
            2 + 3 * 8 + 1,
            "what came an hour later is not counted"
        );
    };
    check(&marks);
    // The order in which marks were kept decides nothing.
    marks.reverse();
    check(&marks);
}

#[test]
fn without_a_service_the_path_ends_in_the_complete_status() {
    let marks: Vec<Mark> = rollout()
        .into_iter()
        .filter(|m| !m.resource.starts_with("endpointslices"))
        .collect();
    let found = ask(&marks, "deployments.apps", "web", &["endpointslices"]).unwrap();
    assert_eq!(
        found.steps.last().unwrap().what,
        "create deployments.apps/status web"
    );
    assert_eq!(found.total_us, 420 + 50_000 + 150 + 50);
}

#[test]
fn the_last_request_with_effects_is_shown_unless_another_is_asked_for() {
    let mut scale = mark(("deployments.apps", "web", "2000"), 100_000, 10, None);
    scale.subresource = "scale".into();
    let set = mark(
        ("replicasets.apps", "web-1", "2001"),
        100_100,
        10,
        Some("deployments.apps/default/web@2000"),
    );
    let label = mark(("deployments.apps", "web", "2002"), 200_000, 10, None);
    let mut marks = rollout();
    marks.extend([scale, set, label]);
    let shown = |last: Option<usize>| {
        let question = Question {
            resource: "deployments.apps",
            namespace: "default",
            name: "web",
            ends: &[],
            last,
        };
        waterfall(&marks, &question).map(|found| (found.resource_version, found.later))
    };
    let expected = |version: &str, later| Some((version.to_owned(), later));
    assert_eq!(shown(None), expected("2000", 1));
    assert_eq!(shown(Some(1)), expected("2002", 0));
    assert_eq!(shown(Some(2)), expected("2000", 1));
    assert_eq!(shown(Some(3)), expected("10", 2));
    assert_eq!(shown(Some(4)), None);
}

#[test]
fn the_path_of_a_pod_of_a_deployment_begins_at_the_deployment() {
    let mut marks = rollout();
    for mark in &mut marks {
        if mark.name == "p2" && mark.resource_version == "203" {
            mark.client_stages.push(Stage {
                name: COMPLETE.into(),
                start_us: mark.start_us,
                dur_us: 0,
            });
        }
    }
    let found = ask(&marks, "pods", "p2", &["endpointslices.discovery.k8s.io"]).unwrap();
    assert_eq!(found.request, "create deployments.apps web");
    assert!(found.complete);
    let requests: Vec<&str> = found.steps.iter().map(|s| s.what.as_str()).collect();
    assert!(requests.contains(&"create pods p2") && !requests.contains(&"create pods p3"));
    assert_eq!(
        requests.last(),
        Some(&"create endpointslices.discovery.k8s.io web")
    );
    assert_eq!(found.total_us, 410 + 5_000 + 300 + 50);
}

#[test]
fn gates_fit_into_their_step() {
    let gate = |start_us, dur_us| Stage {
        name: "store".into(),
        start_us,
        dur_us,
    };
    let mut first = mark(("deployments.apps", "web", "2"), 0, 9_000, None);
    first.stages = vec![gate(500, 8_000)];
    let second = mark(
        ("replicasets.apps", "web", "3"),
        2_000,
        1_000,
        Some("deployments.apps/default/web@2"),
    );
    let found = ask(&[first, second], "deployments.apps", "web", &[]).unwrap();
    assert_eq!(found.steps[0].dur_us, 2_000);
    assert_eq!(found.steps[0].gates, [gate(500, 1_500)]);
}

#[test]
fn work_that_an_earlier_write_told_of_is_on_the_path() {
    let stage = |name: &str, start_us, dur_us| Stage {
        name: name.into(),
        start_us,
        dur_us,
    };
    let cause = Some("pods/default/web@1");
    let mut early = mark(("pods", "web", "2"), 3_000, 500, cause);
    early.client_stages = vec![stage("sandbox", 1_000, 2_000)];
    let mut late = mark(("pods", "web", "3"), 5_000, 500, cause);
    late.client_stages = vec![stage("start", 3_200, 1_800)];
    let marks = vec![mark(("pods", "web", "1"), 0, 1_000, None), early, late];
    let found = ask(&marks, "pods", "web", &[]).unwrap();
    let steps: Vec<(&str, i64)> = found.steps.iter().map(|s| (s.what.as_str(), s.dur_us)).collect();
    assert_eq!(
        steps,
        [
            ("create pods web", 1_000),
            ("sandbox", 2_000),
            ("create pods web", 500),
            ("start", 1_500),
            ("create pods web", 500),
        ]
    );
}

#[test]
fn an_effect_that_is_faster_than_the_answer_to_its_cause_is_on_the_path() {
    let marks = [
        mark(("deployments.apps", "web", "2"), 0, 9_000, None),
        mark(
            ("replicasets.apps", "web", "3"),
            2_000,
            1_000,
            Some("deployments.apps/default/web@2"),
        ),
    ];
    let found = ask(&marks, "deployments.apps", "web", &[]).unwrap();
    let steps: Vec<(&str, i64)> = found.steps.iter().map(|s| (s.what.as_str(), s.dur_us)).collect();
    assert_eq!(
        steps,
        [
            ("create deployments.apps web", 2_000),
            ("create replicasets.apps web", 1_000)
        ]
    );
    assert_eq!(found.total_us, 3_000);
}

#[test]
fn marks_survive_json() {
    let marks = example();
    let text = serde_json::to_string(&marks).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Mark>>(&text).unwrap(), marks);
}

/// The proxy programs what an endpoint changed; an hour later it does so again for a probe that flaps.
#[test]
fn the_path_ends_with_the_rule_in_the_kernel() {
    let slice = "endpointslices.discovery.k8s.io";
    let rule = |version: &str, start_us: i64| {
        let mut rule = mark(
            (SERVICE_RULES, "web", ""),
            start_us,
            50,
            Some(&format!("{slice}/default/web-x@{version}")),
        );
        rule.user = "system:kube-proxy".into();
        rule.code = 200;
        rule
    };
    let mut marks = rollout();
    let slices: Vec<Mark> = marks.iter().filter(|m| m.resource == slice).cloned().collect();
    let needed = ask(&marks, "deployments.apps", "web", &[slice]).unwrap();
    for m in &slices {
        marks.push(Mark {
            cause: Some(m.made()),
            ..rule("", m.end_us() + 100)
        });
    }
    let found = ask(&marks, "deployments.apps", "web", &[SERVICE_RULES, slice]).unwrap();
    assert_eq!(found.total_us, needed.total_us + 150);
    let last = found.steps.last().unwrap();
    assert_eq!(last.what, "service rule in the kernel (web)");
    assert_eq!(last.actor, "system:kube-proxy");
    assert_eq!(found.writes, needed.writes, "rules are no writes");
}

#[test]
fn the_next_try_is_no_step() {
    let mut status = mark(("pods", "p", "2"), 2_000, 100, Some("pods/default/p@1"));
    status.client_stages = vec![Stage {
        name: format!("{NEXT_TRY}c"),
        start_us: 1_500,
        dur_us: 10_000_000,
    }];
    let marks = [mark(("pods", "p", "1"), 0, 100, None), status];
    let found = ask(&marks, "pods", "p", &[]).unwrap();
    let whats: Vec<&str> = found.steps.iter().map(|s| s.what.as_str()).collect();
    assert_eq!(whats, ["create pods p", "watch event, own work", "create pods p"]);
}
