//! Whole questions and answers, with resolvers on loopback.

use super::*;
use crate::corefile::parse;
use crate::zone::{Endpoint, Service, Slice};
use hickory_proto::op::Query;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::AtomicU32;
use tokio::net::UdpSocket;

/// "many" is headless with 100 endpoints; "out", "inside" and "circle" are ExternalNames.
struct Fixture;

impl Records for Fixture {
    fn namespace_exists(&self, namespace: &str) -> bool {
        namespace == "default"
    }

    fn service(&self, _: &str, name: &str) -> Option<Arc<Service>> {
        let external = |target: &str| Service {
            external_name: Some(target.to_owned()),
            ..Service::default()
        };
        let found = match name {
            "many" => Service::default(),
            "out" => external("example.com"),
            "inside" => external("many.default.svc.cluster.local"),
            "circle" => external("round.default.svc.cluster.local"),
            "round" => external("circle.default.svc.cluster.local"),
            _ => return None,
        };
        Some(Arc::new(found))
    }

    fn slices(&self, _: &str, service: &str) -> Vec<Arc<Slice>> {
        let endpoint = |n: u8| Endpoint {
            address: IpAddr::from([10, 0, 0, n]),
            hostname: None,
            pod: None,
            ready: true,
        };
        let count = if service == "many" { 100 } else { 0 };
        vec![Arc::new(Slice {
            endpoints: (0..count).map(endpoint).collect(),
            ..Slice::default()
        })]
    }

    fn service_at(&self, _: IpAddr) -> Option<(String, String)> {
        None
    }

    fn slices_at(&self, _: IpAddr) -> Vec<Arc<Slice>> {
        Vec::new()
    }
}

/// A resolver that knows one address for every name, and counts its questions.
async fn resolver(ttl: u32) -> (SocketAddr, Arc<AtomicU32>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (address, count) = (socket.local_addr().unwrap(), Arc::new(AtomicU32::new(0)));
    let counted = count.clone();
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
            counted.fetch_add(1, Ordering::SeqCst);
            let question = Message::from_vec(&buffer[..length]).unwrap();
            let mut answer = reply_to(&question);
            let name = question.queries[0].name().clone();
            if name.to_ascii().starts_with("none") {
                answer.metadata.response_code = ResponseCode::NXDomain;
            } else {
                let data = RData::A(Ipv4Addr::new(192, 0, 2, 7).into());
                answer.answers = vec![Record::from_rdata(name, ttl, data)];
            }
            // A forged answer first.
            let bytes = answer.to_vec().unwrap();
            let mut forged = bytes.clone();
            forged[1] ^= 1;
            let _ = socket.send_to(&forged, peer).await;
            let _ = socket.send_to(&bytes, peer).await;
        }
    });
    (address, count)
}

fn responder(corefile: &str) -> Arc<Responder<Fixture>> {
    let metrics = Arc::new(Metrics::new(&skiff_prometheus::Registry::new()));
    let config = parse(corefile, &BTreeMap::new()).unwrap();
    let active = Active::new(config, "", &[], &metrics).unwrap();
    Arc::new(Responder::new(Fixture, active, metrics))
}

const KUBERNETES: &str = "kubernetes cluster.local\nloadbalance";

async fn ask(responder: &Arc<Responder<Fixture>>, name: &str, payload: Option<u16>, tcp: bool) -> Message {
    let mut question = Message::query();
    let name = Name::from_ascii(format!("{name}.")).unwrap();
    question.add_query(Query::query(name, RecordType::A));
    question.edns = payload.map(|payload| {
        let mut edns = Edns::new();
        edns.set_max_payload(payload);
        edns
    });
    let client = Client {
        peer: "10.0.0.9:999".parse().unwrap(),
        local: None,
        over_tcp: tcp,
    };
    let bytes = question.to_vec().unwrap();
    let answer = responder.clone().respond(bytes, client).await.unwrap();
    let limit = if tcp {
        usize::MAX
    } else {
        usize::from(question.max_payload())
    };
    assert!(answer.len() <= limit, "{} bytes", answer.len());
    let answer = Message::from_vec(&answer).unwrap();
    assert_eq!(answer.metadata.id, question.metadata.id);
    assert_eq!(answer.edns.is_some(), payload.is_some());
    answer
}

fn data(message: &Message) -> Vec<String> {
    message.answers.iter().map(|r| r.data.to_string()).collect()
}

#[tokio::test]
async fn a_long_answer_is_cut_and_says_so() {
    let responder = responder(&format!(". {{\n{KUBERNETES}\n}}"));
    let name = "many.default.svc.cluster.local";
    let small = ask(&responder, name, None, false).await;
    assert!(
        small.metadata.truncation && small.answers.len() > 20,
        "{}",
        small.answers.len()
    );
    let large = ask(&responder, name, Some(1232), false).await;
    assert!(large.metadata.truncation && large.answers.len() > small.answers.len());
    let whole = ask(&responder, name, None, true).await;
    assert!(!whole.metadata.truncation && whole.answers.len() == 100);
    let next = ask(&responder, name, None, true).await;
    assert_ne!(whole.answers[0], next.answers[0], "each endpoint gets its turn");
}

#[tokio::test]
async fn an_external_name_is_followed_to_its_addresses() {
    let (address, _) = resolver(60).await;
    let responder = responder(&format!(". {{\n{KUBERNETES}\nforward . {address}\n}}"));
    let out = ask(&responder, "out.default.svc.cluster.local", None, false).await;
    assert_eq!(data(&out), ["example.com.", "192.0.2.7"]);
    let inside = ask(&responder, "inside.default.svc.cluster.local", None, true).await;
    assert_eq!(inside.answers.len(), 101);
    let circle = ask(&responder, "circle.default.svc.cluster.local", None, true).await;
    assert_eq!(circle.answers.len(), 1 + MAX_ALIASES, "it ends");
}

#[tokio::test]
async fn without_a_resolver_the_alias_alone_is_the_answer() {
    let responder = responder(&format!(". {{\n{KUBERNETES}\n}}\n"));
    let out = ask(&responder, "out.default.svc.cluster.local", None, false).await;
    assert_eq!(
        (out.metadata.response_code, out.answers.len()),
        (ResponseCode::NoError, 1)
    );
    let foreign = ask(&responder, "example.com", None, false).await;
    assert_eq!(foreign.metadata.response_code, ResponseCode::ServFail);
}

#[tokio::test]
async fn forwarded_answers_are_cached_and_asked_for_once() {
    let (address, count) = resolver(300).await;
    let responder = responder(&format!(". {{\nforward . {address}\ncache 30\n}}"));
    let all = (0..20).map(|_| ask(&responder, "a.example.com", Some(1232), false));
    for answer in futures::future::join_all(all).await {
        assert_eq!(data(&answer), ["192.0.2.7"]);
        assert!(
            (1..=30).contains(&answer.answers[0].ttl),
            "the first answer has the time of the cache, too"
        );
    }
    assert_eq!(count.load(Ordering::SeqCst), 1);
    let again = ask(&responder, "A.Example.com", None, false).await;
    assert_eq!(
        (data(&again), count.load(Ordering::SeqCst)),
        (vec!["192.0.2.7".to_owned()], 1)
    );
    // A denial without a SOA is not kept.
    for expected in [2, 3] {
        let none = ask(&responder, "none.example.com", None, false).await;
        assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(count.load(Ordering::SeqCst), expected);
    }
}

#[tokio::test]
async fn a_dead_resolver_is_left_out() {
    let (good, _) = resolver(5).await;
    // Nobody listens there: it is refused at once.
    let dead = UdpSocket::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let lines = format!("forward . {dead} {good} {{\npolicy sequential\nmax_fails 1\nhealth_check 1h\n}}");
    let responder = responder(&format!(". {{\n{lines}\n}}"));
    for n in 0..4 {
        let answer = ask(&responder, &format!("n{n}.example.com"), None, false).await;
        assert_eq!(data(&answer), ["192.0.2.7"]);
    }
    let metrics = responder.active();
    assert!(metrics.blocks[0].forwards[0].down().contains(&dead));
}

#[tokio::test]
async fn zones_rewrites_templates_and_hosts_work_together() {
    let (everything, asked_everything) = resolver(5).await;
    let (stub, asked_stub) = resolver(5).await;
    let responder = responder(&format!(
        ". {{
            rewrite name suffix .alias.org .default.svc.cluster.local answer auto
            template IN A made.org {{
                answer \"{{{{ .Name }}}} 60 IN A 10.9.9.9\"
            }}
            hosts {{
                10.8.8.8 host.org
                fallthrough
            }}
            {KUBERNETES}
            forward . {everything} {{
                except no.org
            }}
        }}
        acme.local {{
            forward . {stub}
        }}"
    ));
    let check = async |name: &str, code: ResponseCode, expected: &[&str]| {
        let answer = ask(&responder, name, None, true).await;
        assert_eq!(
            (answer.metadata.response_code, data(&answer)),
            (code, expected.iter().map(|s| (*s).to_owned()).collect()),
            "{name}"
        );
        assert_eq!(answer.queries[0].name().to_ascii(), format!("{name}."));
        answer
    };
    let ok = ResponseCode::NoError;
    check("x.made.org", ok, &["10.9.9.9"]).await;
    check("host.org", ok, &["10.8.8.8"]).await;
    check("other.org", ok, &["192.0.2.7"]).await;
    assert_eq!(
        (
            asked_everything.load(Ordering::SeqCst),
            asked_stub.load(Ordering::SeqCst)
        ),
        (1, 0)
    );
    check("x.acme.local", ok, &["192.0.2.7"]).await;
    assert_eq!(
        (
            asked_everything.load(Ordering::SeqCst),
            asked_stub.load(Ordering::SeqCst)
        ),
        (1, 1)
    );
    check("x.no.org", ResponseCode::ServFail, &[]).await;
    let many = ask(&responder, "many.alias.org", None, true).await;
    assert_eq!(many.answers.len(), 100);
    assert!(
        many.answers
            .iter()
            .all(|r| r.name.to_ascii() == "many.alias.org.")
    );
    let alias = check("out.alias.org", ok, &["example.com.", "192.0.2.7"]).await;
    assert_eq!(alias.answers[0].name.to_ascii(), "out.alias.org.");
    check("nope.alias.org", ResponseCode::NXDomain, &[]).await;
}

#[tokio::test]
async fn a_loop_is_noticed() {
    // A resolver that sends every question back to us.
    let socket = Arc::new(UdpSocket::bind("127.0.0.1:0").await.unwrap());
    let address = socket.local_addr().unwrap();
    let responder = responder(&format!(". {{\nforward . {address}\nloop\n}}"));
    let ours = responder.clone();
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer).await {
            let (ours, socket, bytes) = (ours.clone(), socket.clone(), buffer[..length].to_vec());
            tokio::spawn(async move {
                let client = Client {
                    peer,
                    local: None,
                    over_tcp: false,
                };
                if let Some(answer) = ours.respond(bytes, client).await {
                    let _ = socket.send_to(&answer, peer).await;
                }
            });
        }
    });
    let active = responder.active();
    let forward = &active.blocks[0].forwards[0];
    assert!(!forward.has_loops());
    responder.loops.look(forward, &Name::root()).await;
    assert!(forward.has_loops());
    let answer = ask(&responder, "example.com", None, false).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    // A good resolver is not taken for one.
    let (good, _) = resolver(5).await;
    let other = self::responder(&format!(". {{\nforward . {good}\nloop\n}}"));
    let active = other.active();
    other
        .loops
        .look(&active.blocks[0].forwards[0], &Name::root())
        .await;
    assert!(!active.blocks[0].forwards[0].has_loops());
}

#[tokio::test]
async fn bad_questions_get_the_code_that_says_so() {
    let responder = responder(". {\n}\n");
    let client = Client {
        peer: "10.0.0.9:999".parse().unwrap(),
        local: None,
        over_tcp: false,
    };
    let send = async |bytes: &[u8]| {
        let answer = responder.clone().respond(bytes.to_vec(), client).await;
        answer.map(|answer| answer[3] & 15)
    };
    let good = b"\x12\x34\x01\x00\0\x01\0\0\0\0\0\0\x01a\x03com\0\0\x01\0\x01";
    assert_eq!(send(good).await, Some(2), "nobody answers: SERVFAIL");
    assert_eq!(send(&good[..15]).await, Some(1), "cut: FORMERR");
    assert_eq!(send(&good[..5]).await, None);
    let mut response = good.to_vec();
    response[2] |= 0x80;
    assert_eq!(send(&response).await, None, "answers are not answered");
    let mut update = good.to_vec();
    update[2] |= 5 << 3;
    assert_eq!(send(&update).await.map(|code| code == 4 || code == 1), Some(true));
    let mut no_question = good[..12].to_vec();
    no_question[5] = 0;
    assert_eq!(send(&no_question).await, Some(1));
    let empty = self::responder("example.org {\n}\n");
    let refused = empty.respond(good.to_vec(), client).await.unwrap();
    assert_eq!(refused[3] & 15, 5, "no zone: REFUSED");
}
