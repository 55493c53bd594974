//! The options of the plugins `kubernetes`, `forward` and `cache`.

use super::{Context, Directive, zones};
use crate::names::{Fall, absolute};
use crate::zone::Kubernetes;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::Name;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The resolvers of the node.
const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;
const TLS_PORT: u16 = 853;
/// COMPAT: the most that `forward` takes.
const MAX_UPSTREAMS: usize = 15;
/// COMPAT: what CoreDNS keeps without a number.
const CACHE_ENTRIES: usize = 9984;

fn number<T: std::str::FromStr>(directive: &Directive, nth: usize) -> Result<T, String> {
    let text = directive
        .args
        .get(nth)
        .ok_or("wrong argument count or unexpected line ending")?;
    text.parse()
        .map_err(|_| format!("{text:?} is not a valid number for {}", directive.name))
}

/// A duration as Go writes it: `10s`, `1m30s`, `500ms`.
fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("invalid duration {text:?}");
    let mut rest = text;
    let mut total = Duration::ZERO;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() && rest != "0" {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(bad)?;
        let amount: f64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let unit = match &rest[..end] {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return Err(bad()),
        };
        total += Duration::try_from_secs_f64(amount * unit).map_err(|_| bad())?;
        rest = &rest[end..];
    }
    Ok(total)
}

fn code(text: &str) -> Result<ResponseCode, String> {
    Ok(match text.to_uppercase().as_str() {
        "NOERROR" => ResponseCode::NoError,
        "FORMERR" => ResponseCode::FormErr,
        "SERVFAIL" => ResponseCode::ServFail,
        "NXDOMAIN" => ResponseCode::NXDomain,
        "NOTIMP" => ResponseCode::NotImp,
        "REFUSED" => ResponseCode::Refused,
        _ => return Err(format!("{text} is not a valid rcode")),
    })
}

pub(super) fn kubernetes(directive: &Directive, context: &mut Context<'_>) -> Result<Kubernetes, String> {
    let all = context.zones_or_own(&directive.args)?;
    let arpa = absolute("arpa").ok_or("arpa")?;
    let (reverse, zones_of): (Vec<Name>, Vec<Name>) =
        all.into_iter().partition(|zone| arpa.zone_of_case(zone));
    if zones_of.is_empty() {
        return Err("non-reverse zone name must be used".to_owned());
    }
    let mut found = Kubernetes {
        zones: zones_of,
        reverse,
        pods: false,
        ttl: 5,
        fall: Fall::default(),
        namespaces: BTreeSet::new(),
        endpoint_pod_names: false,
        ignore_empty_service: false,
    };
    for line in &directive.block {
        match (line.name.as_str(), line.args.first().map(String::as_str)) {
            ("pods", Some("insecure")) => found.pods = true,
            ("pods", Some("disabled")) => found.pods = false,
            ("pods", Some("verified")) => {
                return Err("pods verified is not supported: use insecure or disabled".to_owned());
            }
            ("pods", _) => return Err("wrong value for pods, must be one of: disabled, insecure".to_owned()),
            ("fallthrough", None) => found.fall = Fall(vec![Name::root()]),
            ("fallthrough", _) => found.fall = Fall(zones(&line.args)?),
            ("ttl", _) => {
                found.ttl = number(line, 0)?;
                if found.ttl > 3600 {
                    return Err(format!("ttl must be in range [0, 3600]: {}", found.ttl));
                }
            }
            ("namespaces", Some(_)) => found.namespaces.extend(line.args.iter().cloned()),
            ("endpoint_pod_names", None) => found.endpoint_pod_names = true,
            ("ignore", Some("empty_service")) => found.ignore_empty_service = true,
            (name, _) => return Err(format!("property '{name}' is not supported")),
        }
    }
    Ok(found)
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Policy {
    #[default]
    Random,
    RoundRobin,
    Sequential,
}

/// Where `forward` goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upstreams {
    /// The `nameserver` lines of the node's resolv.conf, which may change.
    ResolvConf,
    Address {
        address: SocketAddr,
        tls: bool,
        /// `tls://IP%NAME`.
        server_name: Option<String>,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub struct ForwardConfig {
    pub from: Name,
    pub except: Vec<Name>,
    pub to: Vec<Upstreams>,
    pub policy: Policy,
    pub max_fails: u32,
    pub health_check: Duration,
    pub health_domain: Name,
    pub health_recursion: bool,
    pub force_tcp: bool,
    pub prefer_udp: bool,
    pub expire: Duration,
    pub max_idle: usize,
    /// None: as many as the server allows.
    pub max_concurrent: Option<usize>,
    pub tls_servername: Option<String>,
    /// PEM of who signs the resolvers' certificates; the machine's authorities without.
    pub tls_ca: Option<String>,
    pub failover: Vec<ResponseCode>,
    pub next: Vec<ResponseCode>,
    pub fail_fast: bool,
}

impl ForwardConfig {
    pub(super) fn parse(directive: &Directive, context: &mut Context<'_>) -> Result<Self, String> {
        let missing = || "wrong argument count or unexpected line ending".to_owned();
        let (from, to) = directive.args.split_first().ok_or_else(missing)?;
        if to.is_empty() {
            return Err(missing());
        }
        let from = zones(std::slice::from_ref(from))?.remove(0);
        let mut all = Vec::new();
        for text in to {
            all.extend(destination(text, context)?);
        }
        if all.len() > MAX_UPSTREAMS {
            return Err(format!("more than {MAX_UPSTREAMS} TOs configured: {}", all.len()));
        }
        let mut found = ForwardConfig {
            from,
            except: Vec::new(),
            to: all,
            policy: Policy::default(),
            max_fails: 2,
            health_check: Duration::from_millis(500),
            health_domain: Name::root(),
            health_recursion: true,
            force_tcp: false,
            prefer_udp: false,
            expire: Duration::from_secs(10),
            max_idle: 16,
            max_concurrent: None,
            tls_servername: None,
            tls_ca: None,
            failover: Vec::new(),
            next: Vec::new(),
            fail_fast: false,
        };
        for line in &directive.block {
            found.option(line, context)?;
        }
        Ok(found)
    }

    fn option(&mut self, line: &Directive, context: &mut Context<'_>) -> Result<(), String> {
        let first = line.args.first().map(String::as_str);
        match (line.name.as_str(), first) {
            ("except", Some(_)) => self.except.extend(zones(&line.args)?),
            ("max_fails", _) => self.max_fails = number(line, 0)?,
            ("health_check", Some(text)) => {
                self.health_check = duration(text)?.max(Duration::from_millis(50));
                let mut options = line.args[1..].iter();
                while let Some(option) = options.next() {
                    match option.as_str() {
                        "no_rec" => self.health_recursion = false,
                        "domain" => {
                            let name = options.next().and_then(|name| absolute(name));
                            self.health_domain = name.ok_or("health_check: invalid domain name")?;
                        }
                        option => return Err(format!("health_check: unknown option {option}")),
                    }
                }
            }
            ("force_tcp", None) => self.force_tcp = true,
            ("prefer_udp", None) => self.prefer_udp = true,
            ("expire", Some(text)) => self.expire = duration(text)?,
            ("max_idle_conns", _) => self.max_idle = number::<usize>(line, 0)?.clamp(1, 64),
            ("policy", Some("random")) => self.policy = Policy::Random,
            ("policy", Some("round_robin")) => self.policy = Policy::RoundRobin,
            ("policy", Some("sequential")) => self.policy = Policy::Sequential,
            ("policy", Some(policy)) => return Err(format!("unknown policy '{policy}'")),
            ("max_concurrent", _) => {
                self.max_concurrent = Some(number(line, 0)?).filter(|count| *count > 0);
            }
            ("tls_servername", Some(name)) => self.tls_servername = Some(name.to_owned()),
            ("tls", None) => {}
            ("tls", Some(path)) if line.args.len() == 1 => {
                self.tls_ca = Some(context.file(path)?.to_owned());
            }
            ("tls", _) => {
                return Err("client certificates are not supported: tls takes a CA alone".to_owned());
            }
            ("failover", Some(_)) => {
                for text in &line.args {
                    let code = code(text)?;
                    if code == ResponseCode::NoError {
                        return Err("NoError cannot be used in failover".to_owned());
                    }
                    self.failover.push(code);
                }
            }
            ("next", Some(_)) => {
                for text in &line.args {
                    self.next.push(code(text)?);
                }
            }
            ("failfast_all_unhealthy_upstreams", None) => self.fail_fast = true,
            (name, _) => {
                return Err(format!(
                    "property '{name}' is not supported, or its arguments are wrong"
                ));
            }
        }
        Ok(())
    }
}

/// `ADDRESS[:PORT]`, `dns://…`, `tls://ADDRESS[%NAME][:PORT]`, /etc/resolv.conf, or a key in its form.
fn destination(text: &str, context: &Context<'_>) -> Result<Vec<Upstreams>, String> {
    let (tls, rest) = match text.split_once("://") {
        Some(("tls", rest)) => (true, rest),
        Some(("dns", rest)) => (false, rest),
        Some((scheme, _)) => {
            return Err(format!(
                "'{scheme}' is not supported as a destination protocol in forward: {text}"
            ));
        }
        None => (false, text),
    };
    if rest == RESOLV_CONF && !tls {
        return Ok(vec![Upstreams::ResolvConf]);
    }
    if rest.starts_with('/') {
        let found = crate::forward::nameservers(context.file(rest)?);
        if found.is_empty() {
            return Err(format!("no nameservers found in {rest}"));
        }
        let plain = |address| Upstreams::Address {
            address,
            tls: false,
            server_name: None,
        };
        return Ok(found.into_iter().map(plain).collect());
    }
    let bad = || format!("not an IP address or file: {text:?}");
    let default_port = if tls { TLS_PORT } else { DNS_PORT };
    // The name of the certificate is between the address and the port.
    let (host, server_name, port) = match rest.split_once('%') {
        Some((host, name)) => match name.rsplit_once(':') {
            Some((name, port)) => (host, Some(name), Some(port)),
            None => (host, Some(name), None),
        },
        None => (rest, None, None),
    };
    let address = match (
        host.parse::<SocketAddr>(),
        host.trim_matches(['[', ']']).parse::<IpAddr>(),
    ) {
        (Ok(address), _) => address,
        (_, Ok(ip)) => SocketAddr::new(ip, default_port),
        _ => return Err(bad()),
    };
    let port = port.map(|port| port.parse().map_err(|_| bad())).transpose()?;
    let server_name = server_name.map(|name| name.trim_end_matches(']').to_owned());
    if server_name.is_some() && !tls {
        return Err(format!(
            "{text}: only tls:// takes a server name; scoped addresses are not supported"
        ));
    }
    Ok(vec![Upstreams::Address {
        address: SocketAddr::new(address.ip(), port.unwrap_or(address.port())),
        tls,
        server_name,
    }])
}

/// How long answers of `forward` are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheConfig {
    pub zones: Vec<Name>,
    pub positive: Kept,
    pub negative: Kept,
    pub servfail: Duration,
    pub keep_ttl: bool,
}

/// Of one sort of answers: how many, how long, and for which zones not.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    pub entries: usize,
    pub max: Duration,
    pub min: Duration,
    pub except: Vec<Name>,
}

impl CacheConfig {
    pub(super) fn parse(directive: &Directive, context: &mut Context<'_>) -> Result<Self, String> {
        let seconds = |text: &str| -> Result<Duration, String> {
            match text.parse::<u32>() {
                Ok(0) | Err(_) => Err(format!("cache TTL can not be zero or negative: {text}")),
                Ok(ttl) => Ok(Duration::from_secs(ttl.into())),
            }
        };
        let mut args = directive.args.as_slice();
        let kept = |default: u64| Kept {
            entries: CACHE_ENTRIES,
            max: Duration::from_secs(default),
            min: Duration::from_secs(5),
            except: Vec::new(),
        };
        let (mut positive, mut negative) = (kept(3600), kept(1800));
        if let Some((first, rest)) = args.split_first()
            && first.bytes().all(|b| b.is_ascii_digit() || b == b'-')
        {
            positive.max = seconds(first)?;
            negative.max = positive.max;
            args = rest;
        }
        let mut found = CacheConfig {
            zones: context.zones_or_own(args)?,
            positive,
            negative,
            servfail: Duration::from_secs(5),
            keep_ttl: false,
        };
        for line in &directive.block {
            let first = line.args.first().map(String::as_str);
            match (line.name.as_str(), first) {
                (name @ ("success" | "denial"), Some(_)) => {
                    let kept = match name {
                        "success" => &mut found.positive,
                        _ => &mut found.negative,
                    };
                    kept.entries = number(line, 0)?;
                    if let Some(text) = line.args.get(1) {
                        kept.max = seconds(text)?;
                    }
                    if line.args.len() > 2 {
                        kept.min = Duration::from_secs(number::<u32>(line, 2)?.into());
                    }
                }
                ("servfail", Some(text)) => {
                    found.servfail = duration(text)?;
                    if found.servfail > Duration::from_secs(300) {
                        return Err("caching SERVFAIL responses over 5 minutes is not permitted".to_owned());
                    }
                }
                ("disable", Some(sort @ ("success" | "denial"))) => {
                    let except = match line.args.len() {
                        1 => vec![Name::root()],
                        _ => zones(&line.args[1..])?,
                    };
                    match sort {
                        "success" => found.positive.except = except,
                        _ => found.negative.except = except,
                    }
                }
                ("keepttl", None) => found.keep_ttl = true,
                (name, _) => {
                    return Err(format!(
                        "property '{name}' is not supported, or its arguments are wrong"
                    ));
                }
            }
        }
        Ok(found)
    }
}
