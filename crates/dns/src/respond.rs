//! From a question to its answer, bytes in, bytes out: the zone first, then the resolvers of the host. It knows
//! no socket.

use crate::forward::Upstream;
use crate::zone::{Records, Zone};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Names that an answer may lead through (an ExternalName that names an ExternalName, ...).
const MAX_ALIASES: usize = 8;
/// What we take by UDP, as CoreDNS and most resolvers: it fits into a frame.
const OWN_PAYLOAD: u16 = 1232;

/// The longest answer by UDP, whatever the question allows: the rest comes by TCP, whose peers are not forged.
const MAX_PAYLOAD: u16 = 4096;

pub struct Responder<R> {
    pub zone: Zone,
    pub records: R,
    pub upstream: Upstream,
    /// Moves the addresses of an answer on, question by question: clients take the first.
    pub turn: AtomicUsize,
}

impl<R: Records> Responder<R> {
    /// The answer to a message; `None` for what is not a question at all.
    pub async fn respond(&self, bytes: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
        let question = Message::from_vec(bytes).ok()?;
        if question.metadata.message_type != MessageType::Query {
            return None;
        }
        let mut answer = reply_to(&question);
        if question.metadata.op_code != OpCode::Query {
            answer.metadata.response_code = ResponseCode::NotImp;
        } else if let [query] = question.queries.as_slice() {
            match self.zone.answer(query.name(), query.query_type(), &self.records) {
                Some(found) => {
                    answer.metadata.authoritative = true;
                    answer.metadata.response_code = found.code;
                    answer.answers = found.records;
                    answer.additionals = found.additionals;
                    answer.authorities = found.authority.into_iter().collect();
                    self.follow_aliases(query.query_type(), &mut answer).await;
                    self.rotate(&mut answer.answers);
                }
                None => match self.upstream.ask(bytes, question.max_payload(), over_tcp).await {
                    Some(forwarded) => return Some(forwarded),
                    None => answer.metadata.response_code = ResponseCode::ServFail,
                },
            }
        } else {
            answer.metadata.response_code = ResponseCode::FormErr;
        }
        let limit = if over_tcp {
            u16::MAX
        } else {
            question.max_payload().min(MAX_PAYLOAD)
        };
        fit(answer, usize::from(limit))
    }

    /// COMPAT: who asks for the address of an ExternalName service wants an address, and stub resolvers do not
    /// go on from an alias themselves.
    async fn follow_aliases(&self, kind: RecordType, answer: &mut Message) {
        if !matches!(kind, RecordType::A | RecordType::AAAA) {
            return;
        }
        for _ in 0..MAX_ALIASES {
            let Some(target) = alias_without_end(&answer.answers, kind) else {
                return;
            };
            let more = match self.zone.answer(&target, kind, &self.records) {
                Some(found) => found.records,
                None => self.look_up(target, kind).await,
            };
            if more.is_empty() {
                return;
            }
            answer.answers.extend(more);
        }
    }

    /// A question of our own to the resolvers.
    async fn look_up(&self, name: Name, kind: RecordType) -> Vec<Record> {
        let mut question = Message::query();
        question.metadata.recursion_desired = true;
        question.add_query(Query::query(name, kind));
        question.edns = Some(own_edns());
        let Ok(bytes) = question.to_vec() else {
            return Vec::new();
        };
        let read = |answer: Option<Vec<u8>>| Message::from_vec(&answer?).ok();
        let mut answer = read(self.upstream.ask(&bytes, OWN_PAYLOAD, false).await);
        if answer.as_ref().is_some_and(|answer| answer.metadata.truncation) {
            answer = read(self.upstream.ask(&bytes, OWN_PAYLOAD, true).await).or(answer);
        }
        answer.map(|answer| answer.answers).unwrap_or_default()
    }

    fn rotate(&self, records: &mut [Record]) {
        let is_address = |r: &Record| matches!(r.data, RData::A(_) | RData::AAAA(_));
        let first = records.iter().position(is_address).unwrap_or(records.len());
        let addresses = &mut records[first..];
        if addresses.len() > 1 && addresses.iter().all(is_address) {
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            addresses.rotate_left(turn % addresses.len());
        }
    }
}

/// Where the last alias leads, if the answer does not say it.
fn alias_without_end(records: &[Record], kind: RecordType) -> Option<Name> {
    if records.iter().any(|r| r.record_type() == kind) {
        return None;
    }
    match &records.last()?.data {
        RData::CNAME(target) => Some(target.0.clone()),
        _ => None,
    }
}

fn own_edns() -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(OWN_PAYLOAD);
    edns
}

fn reply_to(question: &Message) -> Message {
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.queries.clone_from(&question.queries);
    if question.edns.is_some() {
        answer.edns = Some(own_edns());
    }
    answer
}

/// The message in at most `limit` bytes. What is only there to help goes first; then as many answers are left as
/// fit, and the rest is said to be missing: a client that cannot ask again by TCP has some of them at least.
fn fit(mut message: Message, limit: usize) -> Option<Vec<u8>> {
    let encoded = message.to_vec().ok()?;
    if encoded.len() <= limit {
        return Some(encoded);
    }
    message.additionals.clear();
    let encoded = message.to_vec().ok()?;
    if encoded.len() <= limit {
        return Some(encoded);
    }
    message.metadata.truncation = true;
    let all = std::mem::take(&mut message.answers);
    let (mut fits, mut too_many) = (0, all.len());
    while too_many - fits > 1 {
        let middle = fits.midpoint(too_many);
        message.answers = all[..middle].to_vec();
        if message.to_vec().ok()?.len() <= limit {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    message.answers = all[..fits].to_vec();
    message.to_vec().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zone::{Endpoint, Service};
    use std::net::IpAddr;
    use tokio::net::UdpSocket;

    /// "many" is headless with 100 endpoints; "out" and "inside" are ExternalNames.
    struct Fixture;

    impl Records for Fixture {
        fn namespace_exists(&self, namespace: &str) -> bool {
            namespace == "default"
        }

        fn service(&self, _namespace: &str, name: &str) -> Option<Service> {
            let external = |target: &str| Service {
                external_name: Some(target.to_owned()),
                ..Service::default()
            };
            match name {
                "many" => Some(Service::default()),
                "out" => Some(external("example.com")),
                "inside" => Some(external("many.default.svc.cluster.local")),
                "circle" => Some(external("circle.default.svc.cluster.local")),
                _ => None,
            }
        }

        fn endpoints(&self, _namespace: &str, service: &str) -> Vec<Endpoint> {
            let endpoint = |n: u8| Endpoint {
                address: IpAddr::from([10, 0, 0, n]),
                hostname: None,
                ports: vec![],
            };
            let count = if service == "many" { 100 } else { 0 };
            (0..count).map(endpoint).collect()
        }

        fn names_of(&self, _address: IpAddr) -> Vec<(String, String, Option<String>)> {
            vec![]
        }
    }

    fn responder(resolvers: Vec<std::net::SocketAddr>) -> Responder<Fixture> {
        Responder {
            zone: Zone::new("cluster.local").unwrap(),
            records: Fixture,
            upstream: Upstream::new(resolvers),
            turn: AtomicUsize::new(0),
        }
    }

    async fn ask(responder: &Responder<Fixture>, name: &str, payload: Option<u16>, tcp: bool) -> Message {
        let mut question = Message::query();
        let name = Name::from_ascii(format!("{name}.")).unwrap();
        question.add_query(Query::query(name, RecordType::A));
        question.edns = payload.map(|payload| {
            let mut edns = Edns::new();
            edns.set_max_payload(payload);
            edns
        });
        let answer = responder.respond(&question.to_vec().unwrap(), tcp).await.unwrap();
        let limit = if tcp {
            usize::MAX
        } else {
            usize::from(question.max_payload())
        };
        assert!(answer.len() <= limit, "{} bytes", answer.len());
        Message::from_vec(&answer).unwrap()
    }

    #[tokio::test]
    async fn a_long_answer_is_cut_and_says_so() {
        let responder = responder(vec![]);
        let name = "many.default.svc.cluster.local";
        let small = ask(&responder, name, None, false).await;
        assert!(
            small.metadata.truncation && small.answers.len() > 20,
            "{}",
            small.answers.len()
        );
        let large = ask(&responder, name, Some(1232), false).await;
        assert!(large.metadata.truncation && large.answers.len() > small.answers.len());
        assert!(large.edns.is_some() && small.edns.is_none());
        let whole = ask(&responder, name, None, true).await;
        assert!(!whole.metadata.truncation && whole.answers.len() == 100);
        let next = ask(&responder, name, None, true).await;
        assert_ne!(whole.answers[0], next.answers[0], "each endpoint gets its turn");
    }

    #[tokio::test]
    async fn an_external_name_is_followed_to_its_addresses() {
        let resolver = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let responder = responder(vec![resolver.local_addr().unwrap()]);
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            while let Ok((length, peer)) = resolver.recv_from(&mut buffer).await {
                let question = Message::from_vec(&buffer[..length]).unwrap();
                let mut answer = reply_to(&question);
                let data = RData::A(std::net::Ipv4Addr::new(192, 0, 2, 7).into());
                let name = question.queries[0].name().clone();
                answer.answers = vec![Record::from_rdata(name, 60, data)];
                let _ = resolver.send_to(&answer.to_vec().unwrap(), peer).await;
            }
        });
        let data = |message: &Message| -> Vec<String> {
            message.answers.iter().map(|r| r.data.to_string()).collect()
        };
        let out = ask(&responder, "out.default.svc.cluster.local", None, false).await;
        assert_eq!(data(&out), ["example.com.", "192.0.2.7"]);
        let inside = ask(&responder, "inside.default.svc.cluster.local", None, true).await;
        assert_eq!(inside.answers.len(), 101);
        let foreign = ask(&responder, "example.com", None, false).await;
        assert_eq!(data(&foreign), ["192.0.2.7"]);
        let circle = ask(&responder, "circle.default.svc.cluster.local", None, true).await;
        assert_eq!(circle.answers.len(), 1 + MAX_ALIASES, "it ends");
    }

    #[tokio::test]
    async fn without_a_resolver_the_alias_alone_is_the_answer() {
        let out = ask(&responder(vec![]), "out.default.svc.cluster.local", None, false).await;
        assert_eq!(
            (out.metadata.response_code, out.answers.len()),
            (ResponseCode::NoError, 1)
        );
        let foreign = ask(&responder(vec![]), "example.com", None, false).await;
        assert_eq!(foreign.metadata.response_code, ResponseCode::ServFail);
    }
}
