//! From a question to its answer, bytes in, bytes out: the server block of its zone, and there one plugin after the other,
//! in CoreDNS' order. It knows no socket.

use crate::cache::{Cache, Key};
use crate::corefile::{BlockConfig, Config};
use crate::forward::{Asked, Forward, ForwardError, Loops, OWN_PAYLOAD};
use crate::metrics::{Answered, Metrics};
use crate::names::longest;
use crate::plugins::log::Logged;
use crate::plugins::{hosts, rewrite, template};
use crate::wire::{Forwarded, add_opt, cut, fit};
use crate::zone::Records;
use futures::FutureExt;
use futures::future::BoxFuture;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use tokio::time::Instant;

/// Names that an answer may lead through (an ExternalName that names an ExternalName, ...).
const MAX_ALIASES: usize = 8;
/// The longest answer by UDP, whatever the question allows: the rest comes by TCP, whose peers are not forged.
const MAX_PAYLOAD: u16 = 4096;
const MIN_PAYLOAD: u16 = 512;
/// What all caches may take together.
const CACHE_BYTES: usize = 16 << 20;

/// A server block in use.
pub(crate) struct Block {
    pub(crate) config: BlockConfig,
    /// The zone that metrics name.
    label: Arc<str>,
    cache: Option<Arc<Cache>>,
    pub(crate) forwards: Vec<Arc<Forward>>,
}

/// A Corefile in use.
#[derive(Default)]
pub(crate) struct Active {
    pub(crate) blocks: Vec<Block>,
}

impl Active {
    /// Puts a configuration to work; an error names what cannot be.
    pub(crate) fn new(
        config: Config,
        resolv_conf: &str,
        own: &[IpAddr],
        metrics: &Arc<Metrics>,
    ) -> Result<Active, String> {
        let caches = config.blocks.iter().filter(|block| block.cache.is_some()).count();
        let mut blocks = Vec::new();
        for mut config in config.blocks {
            let forwards = std::mem::take(&mut config.forwards).into_iter();
            let forwards =
                forwards.map(|forward| Forward::new(forward, resolv_conf, own.to_vec(), metrics.clone()));
            let forwards: Vec<Arc<Forward>> = forwards.collect::<Result<_, _>>()?;
            let cache = config.cache.take();
            let label = config
                .zones
                .first()
                .map(|zone| zone.to_ascii())
                .unwrap_or_default();
            blocks.push(Block {
                config,
                label: label.into(),
                cache: cache.map(|cache| Arc::new(Cache::new(cache, CACHE_BYTES / caches.max(1)))),
                forwards,
            });
        }
        Ok(Active { blocks })
    }

    /// The block of the longest zone that a name in lower case is in.
    fn block(&self, lower: &Name) -> Option<&Block> {
        let zone = |block: &Block| longest(&block.config.zones, lower).map(Name::num_labels);
        let found = self.blocks.iter().filter_map(|block| Some((zone(block)?, block)));
        found.max_by_key(|(labels, _)| *labels).map(|(_, block)| block)
    }

    pub(crate) fn forwards(&self) -> impl Iterator<Item = &Arc<Forward>> {
        self.blocks.iter().flat_map(|block| &block.forwards)
    }
}

/// Who asks, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    pub(crate) peer: SocketAddr,
    pub(crate) local: Option<IpAddr>,
    pub(crate) over_tcp: bool,
}

pub(crate) struct Responder<R> {
    pub(crate) records: R,
    active: RwLock<Arc<Active>>,
    pub(crate) loops: Arc<Loops>,
    pub(crate) metrics: Arc<Metrics>,
    /// Moves the addresses of an answer on, question by question: clients take the first.
    turn: AtomicUsize,
    errors: Errors,
}

/// What is asked.
#[derive(Clone)]
struct Question {
    name: Name,
    kind: RecordType,
    class: DNSClass,
    dnssec: bool,
    checking_disabled: bool,
    recursion: bool,
    remote: IpAddr,
}

#[derive(Default)]
struct Reply {
    code: ResponseCode,
    authoritative: bool,
    answers: Vec<Record>,
    authorities: Vec<Record>,
    additionals: Vec<Record>,
    plugin: &'static str,
}

impl Reply {
    fn code(code: ResponseCode, plugin: &'static str) -> Reply {
        Reply {
            code,
            plugin,
            ..Reply::default()
        }
    }
}

enum Found {
    Reply(Reply),
    /// A resolver's answer, and how long it may still be kept.
    Forwarded(Arc<Forwarded>, Option<u32>),
    /// A failure, with what the log says of it.
    Failure(ResponseCode, &'static str, String),
}

impl Found {
    /// As records that can be changed.
    fn into_reply(self) -> Found {
        let Found::Forwarded(answer, ttl) = self else {
            return self;
        };
        let Some(message) = answer.decode() else {
            return Found::Failure(
                ResponseCode::ServFail,
                "rewrite",
                "an answer cannot be decoded".into(),
            );
        };
        let mut reply = Reply {
            code: message.metadata.response_code,
            authoritative: message.metadata.authoritative,
            answers: message.answers,
            authorities: message.authorities,
            additionals: message.additionals,
            plugin: "forward",
        };
        if let Some(ttl) = ttl {
            let sections = [&mut reply.answers, &mut reply.authorities, &mut reply.additionals];
            sections.into_iter().flatten().for_each(|record| record.ttl = ttl);
        }
        Found::Reply(reply)
    }
}

impl<R: Records + Send + Sync + 'static> Responder<R> {
    pub(crate) fn new(records: R, active: Active, metrics: Arc<Metrics>) -> Responder<R> {
        Responder {
            records,
            active: RwLock::new(Arc::new(active)),
            loops: Arc::default(),
            metrics,
            turn: AtomicUsize::new(0),
            errors: Errors::default(),
        }
    }

    pub(crate) fn active(&self) -> Arc<Active> {
        self.active.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn activate(&self, active: Active) {
        *self.active.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(active);
    }

    /// The answer to a message; `None` for what is not a question at all.
    pub(crate) async fn respond(self: Arc<Self>, bytes: Vec<u8>, client: Client) -> Option<Vec<u8>> {
        let began = Instant::now();
        let is_question = bytes.len() >= 12 && bytes[2] & 0x80 == 0;
        if !is_question {
            return None;
        }
        let Ok(message) = Message::from_vec(&bytes) else {
            return Some(format_error(&bytes));
        };
        let [query] = message.queries.as_slice() else {
            return refuse(&message, ResponseCode::FormErr);
        };
        if message.metadata.message_type != MessageType::Query {
            return None;
        }
        if message.metadata.op_code != OpCode::Query {
            return refuse(&message, ResponseCode::NotImp);
        }
        if message.version() > 0 {
            return refuse(&message, ResponseCode::BADVERS);
        }
        let question = Question {
            name: query.name().clone(),
            kind: query.query_type(),
            class: query.query_class(),
            dnssec: message.edns.as_ref().is_some_and(|edns| edns.flags().dnssec_ok),
            checking_disabled: message.metadata.checking_disabled,
            recursion: message.metadata.recursion_desired,
            remote: client.peer.ip(),
        };
        let active = self.active();
        let block = active.block(&question.name.to_lowercase());
        let found = match block {
            Some(_) if self.loops.is_ours(&question.name, question.kind) => {
                Found::Reply(Reply::code(ResponseCode::ServFail, "loop"))
            }
            Some(block) => self.resolve(&active, block, &question, 0).await,
            None => Found::Reply(Reply::code(ResponseCode::Refused, "")),
        };
        if let (Found::Failure(_, plugin, why), Some(true)) = (&found, block.map(|b| b.config.errors)) {
            self.errors.log(plugin, why, &question);
        }
        let limit = match client.over_tcp {
            true => u16::MAX,
            false => message.max_payload().clamp(MIN_PAYLOAD, MAX_PAYLOAD),
        };
        let rotates = block.is_some_and(|block| block.config.loadbalance);
        let told = self.encode(found, &message, &bytes, limit, rotates, question.dnssec)?;
        let answered = Answered {
            zone: block.map_or("dropped", |block| &block.label),
            kind: question.kind,
            over_tcp: client.over_tcp,
            is_ipv6: client.peer.is_ipv6(),
            dnssec: question.dnssec,
            code: told.code,
            plugin: told.plugin,
            question_bytes: bytes.len(),
            answer_bytes: told.bytes.len(),
            took: began.elapsed(),
        };
        self.metrics.answered(&answered);
        for rule in block.iter().flat_map(|block| &block.config.log) {
            let line = rule.line(&Logged {
                question: &bytes,
                answer: &told.bytes,
                name: &question.name,
                kind: &question.kind.to_string(),
                class: &question.class.to_string(),
                code: told.code,
                answered: told.answered,
                over_tcp: client.over_tcp,
                dnssec: question.dnssec,
                payload: message.max_payload(),
                peer: client.peer,
                local: client.local,
                took: answered.took,
            });
            if let Some(line) = line {
                tracing::info!(target: "skiff_dns::log", "{line}");
                // CoreDNS writes one line, by the first rule that fits.
                break;
            }
        }
        Some(told.bytes)
    }

    fn encode(
        &self,
        found: Found,
        question: &Message,
        bytes: &[u8],
        limit: u16,
        rotates: bool,
        dnssec: bool,
    ) -> Option<Told> {
        let turn = || self.turn.fetch_add(1, Ordering::Relaxed);
        let mut reply = match found {
            Found::Forwarded(answer, ttl) => {
                let turn = if rotates { turn() } else { 0 };
                let mut told = answer.told(bytes, ttl, turn, dnssec)?;
                if question.edns.is_some() {
                    add_opt(&mut told, OWN_PAYLOAD, dnssec);
                }
                if told.len() > usize::from(limit) {
                    let decoded = Message::from_vec(&told).ok();
                    told = decoded
                        .and_then(|message| fit(message, limit.into()))
                        .or_else(|| cut(told))?;
                }
                return Some(Told {
                    bytes: told,
                    code: ResponseCode::from_low(answer.code),
                    answered: answer.answered,
                    plugin: "forward",
                });
            }
            Found::Reply(reply) => reply,
            Found::Failure(code, plugin, _) => Reply::code(code, plugin),
        };
        if rotates {
            rotate(&mut reply.answers, turn());
        }
        let (code, plugin, answered) = (reply.code, reply.plugin, !reply.answers.is_empty());
        let mut answer = reply_to(question);
        answer.metadata.response_code = reply.code;
        answer.metadata.authoritative = reply.authoritative;
        answer.answers = reply.answers;
        answer.authorities = reply.authorities;
        answer.additionals = reply.additionals;
        Some(Told {
            bytes: fit(answer, limit.into())?,
            code,
            answered,
            plugin,
        })
    }

    /// What a block says to a question, under the name of the question. `depth` counts aliases that led here.
    fn resolve<'a>(
        &'a self,
        active: &'a Active,
        block: &'a Block,
        question: &'a Question,
        depth: usize,
    ) -> BoxFuture<'a, Found> {
        async move {
            let rewritten = match rewrite::apply(&block.config.rewrite, &question.name) {
                Ok(rewritten) => rewritten,
                Err(why) => return Found::Failure(ResponseCode::ServFail, "rewrite", why),
            };
            let Some(rewritten) = rewritten else {
                return self.answer(active, block, question, depth).await;
            };
            let renamed = Question {
                name: rewritten.name.clone(),
                ..question.clone()
            };
            let mut found = self.answer(active, block, &renamed, depth).await.into_reply();
            if let Found::Reply(reply) = &mut found {
                for section in [&mut reply.answers, &mut reply.authorities, &mut reply.additionals] {
                    rewritten.revert(section);
                }
            }
            found
        }
        .boxed()
    }

    async fn answer(&self, active: &Active, block: &Block, question: &Question, depth: usize) -> Found {
        let asked = template::Asked {
            name: &question.name,
            kind: question.kind,
            class: question.class,
            remote: question.remote,
        };
        let local = matches!(question.class, DNSClass::IN | DNSClass::ANY);
        match template::answer(&block.config.templates, &asked) {
            template::Found::Next => {}
            template::Found::Failure(why) => return Found::Failure(ResponseCode::ServFail, "template", why),
            template::Found::Made(made) => {
                let reply = Reply {
                    code: made.code,
                    authoritative: true,
                    answers: made.answers,
                    authorities: made.authorities,
                    additionals: made.additionals,
                    plugin: "template",
                };
                return self.follow_aliases(active, question, reply, depth).await;
            }
        }
        if let Some(hosts) = block.config.hosts.as_ref().filter(|_| local) {
            match hosts.answer(&question.name, question.kind) {
                hosts::Found::Next => {}
                hosts::Found::Failure => return Found::Reply(Reply::code(ResponseCode::ServFail, "hosts")),
                hosts::Found::Records(answers) => {
                    return Found::Reply(Reply {
                        authoritative: true,
                        answers,
                        ..Reply::code(ResponseCode::NoError, "hosts")
                    });
                }
            }
        }
        let kubernetes = block.config.kubernetes.as_ref().filter(|_| local);
        let found = kubernetes.and_then(|k| k.answer(&question.name, question.kind, &self.records));
        if let Some(found) = found {
            let reply = Reply {
                code: found.code,
                authoritative: found.code != ResponseCode::Refused,
                answers: found.records,
                authorities: found.authority.into_iter().collect(),
                additionals: found.additionals,
                plugin: "kubernetes",
            };
            return self.follow_aliases(active, question, reply, depth).await;
        }
        self.forward(block, question).await
    }

    async fn forward(&self, block: &Block, question: &Question) -> Found {
        let lower = question.name.to_lowercase();
        let forwards: Vec<_> = block
            .forwards
            .iter()
            .filter(|forward| forward.covers(&lower))
            .collect();
        if forwards.is_empty() {
            return Found::Failure(ResponseCode::ServFail, "", "no next plugin found".to_owned());
        }
        let cache = block.cache.as_ref().filter(|cache| cache.covers(&lower));
        let key = Key {
            name: lower.clone(),
            kind: question.kind.into(),
            class: question.class.into(),
            dnssec: question.dnssec,
            checking_disabled: question.checking_disabled,
        };
        if let Some(cache) = cache {
            let hit = cache.get(&key);
            self.metrics
                .cache_asked(&block.label, hit.as_ref().map(|hit| hit.denies));
            if let Some(hit) = hit {
                return Found::Forwarded(hit.answer, Some(hit.ttl));
            }
        }
        let asked = Asked {
            name: question.name.clone(),
            kind: question.kind,
            class: question.class,
            dnssec: question.dnssec,
            checking_disabled: question.checking_disabled,
            recursion: question.recursion,
        };
        let store = cache.map(|cache| (cache.clone(), block.label.clone()));
        let mut why = ForwardError::NoUpstream;
        for (nth, forward) in forwards.iter().enumerate() {
            match forward.ask(asked.clone(), store.clone()).await {
                Ok(answer) => {
                    let code = ResponseCode::from_low(answer.code);
                    if nth + 1 == forwards.len() || !forward.config.next.contains(&code) {
                        // The first answer has the time to live that the next ones count down from.
                        let kept = cache.and_then(|cache| cache.get(&key));
                        return Found::Forwarded(answer, kept.map(|hit| hit.ttl));
                    }
                }
                Err(error) => {
                    why = error;
                    break;
                }
            }
        }
        let code = match why {
            ForwardError::Busy(_) => ResponseCode::Refused,
            _ => ResponseCode::ServFail,
        };
        Found::Failure(code, "forward", why.to_string())
    }

    /// COMPAT: who asks for the address of an ExternalName service wants an address, and stub resolvers do not
    /// go on from an alias themselves.
    async fn follow_aliases(
        &self,
        active: &Active,
        question: &Question,
        mut reply: Reply,
        depth: usize,
    ) -> Found {
        let follows = matches!(question.kind, RecordType::A | RecordType::AAAA | RecordType::TXT);
        let target = alias_without_end(&reply.answers, question.kind).filter(|_| follows);
        let (Some(target), true) = (target, depth < MAX_ALIASES) else {
            return Found::Reply(reply);
        };
        let (Some(block), false) = (active.block(&target.to_lowercase()), target == question.name) else {
            return Found::Reply(reply);
        };
        let next = Question {
            name: target,
            ..question.clone()
        };
        let more = self.resolve(active, block, &next, depth + 1).await.into_reply();
        if let Found::Reply(more) = more {
            reply.answers.extend(more.answers);
        }
        Found::Reply(reply)
    }
}

struct Told {
    bytes: Vec<u8>,
    code: ResponseCode,
    answered: bool,
    plugin: &'static str,
}

fn rotate(records: &mut [Record], turn: usize) {
    let is_address = |r: &Record| matches!(r.data, RData::A(_) | RData::AAAA(_));
    let first = records.iter().position(is_address).unwrap_or(records.len());
    let addresses = &mut records[first..];
    if addresses.len() > 1 && addresses.iter().all(is_address) {
        addresses.rotate_left(turn % addresses.len());
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

fn reply_to(question: &Message) -> Message {
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.metadata.checking_disabled = question.metadata.checking_disabled;
    answer.queries.clone_from(&question.queries);
    if let Some(asked) = &question.edns {
        let mut edns = Edns::new();
        edns.set_max_payload(OWN_PAYLOAD);
        edns.set_dnssec_ok(asked.flags().dnssec_ok);
        answer.edns = Some(edns);
    }
    answer
}

fn refuse(question: &Message, code: ResponseCode) -> Option<Vec<u8>> {
    let mut answer = reply_to(question);
    answer.metadata.response_code = code;
    answer.to_vec().ok()
}

/// To what cannot be read: its id, and that it cannot be.
fn format_error(bytes: &[u8]) -> Vec<u8> {
    let mut answer = vec![0; 12];
    answer[..2].copy_from_slice(&bytes[..2]);
    answer[2] = 0x80 | bytes[2] & 0x79;
    answer[3] = 1;
    answer
}

/// The plugin `errors`: failures are logged, one a second, so that a resolver that is away does not fill the log.
struct Errors {
    began: Instant,
    /// The second, counted from the beginning, of the last line.
    last: AtomicU64,
    passed_over: AtomicU64,
}

impl Default for Errors {
    fn default() -> Self {
        Errors {
            began: Instant::now(),
            last: AtomicU64::new(u64::MAX),
            passed_over: AtomicU64::new(0),
        }
    }
}

impl Errors {
    fn log(&self, plugin: &str, why: &str, question: &Question) {
        let now = self.began.elapsed().as_secs();
        if self.last.swap(now, Ordering::Relaxed) == now {
            self.passed_over.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let passed_over = self.passed_over.swap(0, Ordering::Relaxed);
        let (name, kind) = (&question.name, question.kind);
        tracing::warn!(%name, %kind, plugin, passed_over, "a question failed: {why}");
    }
}

#[cfg(test)]
#[path = "respond_tests.rs"]
mod tests;
