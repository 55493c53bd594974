//! From the rules of routes to those of the table. What cannot be acted on is returned as a problem, with upstream's
//! reason for the route's conditions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::HeaderName;
use http::{HeaderValue, Method, StatusCode};
use k8s_openapi::api::core::v1::ServicePort;
use regex::{Regex, RegexBuilder};

use super::GROUP;
use super::cors::Cors;
use super::filters::{Filters, HeaderChange, Mirror, PathEdit, Redirect, Rewrite};
use super::objects::{
    BackendRef, Filter, GrpcMatch, GrpcMethod, GrpcRule, Header, HeaderModifier, HttpMatch, HttpRule,
    MirrorSpec, NamedMatch, ObjectRef, PathChange, RedirectSpec, ReferenceGrant, RetrySpec, TlsRule,
};
use super::table::{Match, PathRule, Rule, TextRule, WeightedBackend};
use crate::backend::{Backend, BackendKey, Backends, Protocol};
use crate::compile::{Objects, Problem};
use crate::endpoints::{self, AddressPolicy};
use crate::table::{READ_TIMEOUT, Retry};

/// Memory of one expression.
const MAX_REGEX: usize = 128 << 10;
const MAX_RETRIES: usize = 10;
/// Where a backend that speaks TLS would be needed.
const TLS_PROTOCOLS: [&str; 5] = ["https", "HTTPS", "kubernetes.io/wss", "grpcs", "tls"];

fn problem(reason: &'static str, message: String) -> Problem {
    Problem { reason, message }
}

fn unsupported(message: String) -> Problem {
    problem("UnsupportedValue", message)
}

/// Whether an object of one kind may name another one in another namespace.
pub fn is_granted(
    grants: &[Arc<ReferenceGrant>],
    from: (&str, &str),
    to_kind: &str,
    to: (&str, &str),
) -> bool {
    let ((kind, namespace), (to_namespace, name)) = (from, to);
    let mut there = grants
        .iter()
        .filter(|grant| grant.metadata.namespace.as_deref() == Some(to_namespace));
    there.any(|grant| {
        let spec = &grant.spec;
        spec.from
            .iter()
            .any(|from| from.group == GROUP && from.kind == kind && from.namespace == namespace)
            && spec.to.iter().any(|to| {
                to.group.is_empty()
                    && to.kind == to_kind
                    && to.name.as_deref().is_none_or(|only| only == name)
            })
    })
}

/// What rules look at beside themselves.
pub struct RuleCompiler<'a> {
    pub objects: &'a dyn Objects,
    pub grants: &'a [Arc<ReferenceGrant>],
    pub policy: &'a AddressPolicy,
    pub backends: &'a mut Backends,
    pub now: Instant,
}

/// A rule of a route with what is known of it.
pub struct CompiledRule {
    pub rule: Rule,
    pub matches: Vec<Match>,
    /// The first of its references that cannot be resolved.
    pub unresolved: Option<Problem>,
}

/// Whose references are followed.
#[derive(Clone, Copy)]
struct From<'a> {
    kind: &'static str,
    namespace: &'a str,
}

impl RuleCompiler<'_> {
    /// An error says why the whole rule is left out.
    pub fn http(&mut self, namespace: &str, rule: &HttpRule) -> Result<CompiledRule, Problem> {
        let from = From {
            kind: "HTTPRoute",
            namespace,
        };
        let matches = match rule.matches.is_empty() {
            true => vec![http_match(&HttpMatch::default())?],
            false => rule.matches.iter().map(http_match).collect::<Result<_, _>>()?,
        };
        let mut compiled = self.rule(from, matches, &rule.filters, &rule.backend_refs)?;
        let timeouts = rule.timeouts.clone().unwrap_or_default();
        let request = timeouts.request.as_deref().map(duration).transpose()?;
        let backend = timeouts.backend_request.as_deref().map(duration).transpose()?;
        // Zero is no limit.
        let limit = |given: Duration| (!given.is_zero()).then_some(given);
        compiled.rule.request_timeout = request.and_then(limit);
        compiled.rule.backend_timeout = match (backend, request) {
            (Some(given), _) => limit(given),
            (None, Some(_)) => None,
            (None, None) => Some(READ_TIMEOUT),
        };
        compiled.rule.retry = rule.retry.as_ref().map(retry).transpose()?;
        Ok(compiled)
    }

    pub fn grpc(&mut self, namespace: &str, rule: &GrpcRule) -> Result<CompiledRule, Problem> {
        let from = From {
            kind: "GRPCRoute",
            namespace,
        };
        let matches = match rule.matches.is_empty() {
            true => vec![grpc_match(&GrpcMatch::default())?],
            false => rule.matches.iter().map(grpc_match).collect::<Result<_, _>>()?,
        };
        let mut compiled = self.rule(from, matches, &rule.filters, &rule.backend_refs)?;
        compiled.rule.is_grpc = true;
        Ok(compiled)
    }

    pub fn tls(&mut self, namespace: &str, rule: &TlsRule) -> Result<CompiledRule, Problem> {
        let from = From {
            kind: "TLSRoute",
            namespace,
        };
        self.rule(from, Vec::new(), &[], &rule.backend_refs)
    }

    fn rule(
        &mut self,
        from: From<'_>,
        matches: Vec<Match>,
        filters: &[Filter],
        references: &[BackendRef],
    ) -> Result<CompiledRule, Problem> {
        let mut unresolved = None;
        let filters = self.filters(from, filters, &mut unresolved)?;
        let mut backends = Vec::new();
        for reference in references {
            let of_backend = self.filters(from, &reference.filters, &mut unresolved)?;
            if of_backend.redirect.is_some() || of_backend.cors.is_some() {
                let message = "a backend's filters cannot be RequestRedirect or CORS here".to_owned();
                return Err(unsupported(message));
            }
            let backend = self.backend(from, &reference.object);
            backends.push(WeightedBackend {
                weight: reference.weight.unwrap_or(1),
                backend: backend.map_err(|why| unresolved.get_or_insert(why).reason).ok(),
                filters: of_backend,
            });
        }
        let rule = Rule {
            filters,
            backends,
            ..Rule::default()
        };
        Ok(CompiledRule {
            rule,
            matches,
            unresolved,
        })
    }

    fn filters(
        &mut self,
        from: From<'_>,
        list: &[Filter],
        unresolved: &mut Option<Problem>,
    ) -> Result<Filters, Problem> {
        let mut filters = Filters::default();
        for filter in list {
            match filter.type_.as_str() {
                "RequestHeaderModifier" => {
                    filters.request = header_change(filter.request_header_modifier.as_ref())?;
                }
                "ResponseHeaderModifier" => {
                    filters.response = header_change(filter.response_header_modifier.as_ref())?;
                }
                "RequestRedirect" => {
                    filters.redirect = filter.request_redirect.as_ref().map(redirect).transpose()?;
                }
                "URLRewrite" => {
                    let Some(spec) = &filter.url_rewrite else { continue };
                    filters.rewrite = Some(Rewrite {
                        host: spec.hostname.as_deref().map(header_value).transpose()?,
                        path: spec.path.as_ref().and_then(path_edit),
                    });
                }
                "RequestMirror" => {
                    let Some(spec) = &filter.request_mirror else {
                        continue;
                    };
                    let backend = self.backend(from, &spec.backend_ref);
                    filters.mirrors.push(Mirror {
                        backend: backend.map_err(|why| unresolved.get_or_insert(why).reason).ok(),
                        share: mirror_share(spec),
                    });
                }
                "CORS" => {
                    filters.cors = filter.cors.as_ref().map(|spec| Cors {
                        origins: spec.allow_origins.clone(),
                        credentials: spec.allow_credentials.unwrap_or(false),
                        methods: spec.allow_methods.clone(),
                        headers: spec.allow_headers.clone(),
                        expose: spec.expose_headers.clone(),
                        max_age: spec.max_age.unwrap_or(5),
                    });
                }
                other => return Err(unsupported(format!("filters of type {other} are not supported"))),
            }
        }
        Ok(filters)
    }

    /// The port of a Service that a reference names.
    fn backend(&mut self, from: From<'_>, reference: &ObjectRef) -> Result<Arc<Backend>, Problem> {
        let ObjectRef {
            group,
            kind,
            name,
            port,
            ..
        } = reference;
        let namespace = reference.namespace.as_deref().unwrap_or(from.namespace);
        let kind = kind.as_deref().unwrap_or("Service");
        if !group.as_deref().unwrap_or_default().is_empty() || kind != "Service" {
            let message = format!("a backend of kind {kind} is not supported: it must be a Service");
            return Err(problem("InvalidKind", message));
        }
        let permitted = namespace == from.namespace
            || is_granted(
                self.grants,
                (from.kind, from.namespace),
                "Service",
                (namespace, name),
            );
        if !permitted {
            let message =
                format!("no ReferenceGrant of namespace {namespace} permits the reference to Service {name}");
            return Err(problem("RefNotPermitted", message));
        }
        let not_found = |message: String| problem("BackendNotFound", message);
        let Some(service) = self.objects.service(namespace, name) else {
            return Err(not_found(format!("there is no Service {namespace}/{name}")));
        };
        let spec = service.spec.clone().unwrap_or_default();
        if spec.type_.as_deref() == Some("ExternalName") {
            let message =
                format!("Service {namespace}/{name} is of type ExternalName, which is not a backend here");
            return Err(problem("InvalidKind", message));
        }
        let is_wanted = |found: &&ServicePort| {
            let is_tcp = found.protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
            is_tcp && port.is_some_and(|port| i32::from(port) == found.port)
        };
        let mut ports = spec.ports.iter().flatten();
        let Some(found) = ports.find(is_wanted) else {
            let port = port.unwrap_or_default();
            return Err(not_found(format!(
                "Service {namespace}/{name} has no TCP port {port}"
            )));
        };
        let protocol = match (from.kind, found.app_protocol.as_deref()) {
            ("GRPCRoute", _) | (_, Some("kubernetes.io/h2c" | "h2c" | "grpc")) => Protocol::Http2,
            ("HTTPRoute", Some(tls)) if TLS_PROTOCOLS.contains(&tls) => {
                let message = format!(
                    "Service {namespace}/{name} has a port of appProtocol {tls}: TLS to backends is not supported"
                );
                return Err(problem("UnsupportedProtocol", message));
            }
            _ => Protocol::Http1,
        };
        let key = BackendKey {
            namespace: namespace.to_owned(),
            service: name.clone(),
            port: found.name.clone().unwrap_or_default(),
        };
        let slices = self.objects.slices(namespace, name);
        let (addresses, _) = endpoints::addresses(&slices, &key.port, self.policy);
        Ok(self.backends.put(key, protocol, &addresses, self.now))
    }
}

fn mirror_share(spec: &MirrorSpec) -> f64 {
    match (&spec.percent, &spec.fraction) {
        (Some(percent), _) => f64::from(*percent) / 100.0,
        (None, Some(part)) => f64::from(part.numerator) / f64::from(part.denominator.unwrap_or(100).max(1)),
        (None, None) => 1.0,
    }
}

fn header_name(text: &str) -> Result<HeaderName, Problem> {
    HeaderName::from_bytes(text.as_bytes()).map_err(|_| unsupported(format!("{text} cannot be a header")))
}

fn header_value(text: &str) -> Result<HeaderValue, Problem> {
    HeaderValue::from_str(text).map_err(|_| unsupported(format!("{text:?} cannot be the value of a header")))
}

fn header_change(modifier: Option<&HeaderModifier>) -> Result<HeaderChange, Problem> {
    let Some(HeaderModifier { set, add, remove }) = modifier else {
        return Ok(HeaderChange::default());
    };
    let pairs = |list: &[Header]| -> Result<Vec<_>, Problem> {
        list.iter()
            .map(|header| Ok((header_name(&header.name)?, header_value(&header.value)?)))
            .collect()
    };
    let change = HeaderChange {
        set: pairs(set)?,
        add: pairs(add)?,
        remove: remove
            .iter()
            .map(|name| header_name(name))
            .collect::<Result<_, _>>()?,
    };
    match change.breaks_framing() {
        true => Err(unsupported(
            "a filter cannot change the headers that frame a message, such as Content-Length".to_owned(),
        )),
        false => Ok(change),
    }
}

fn path_edit(change: &PathChange) -> Option<PathEdit> {
    let full = change
        .replace_full_path
        .clone()
        .map(|path| match path.starts_with('/') {
            true => PathEdit::Full(path),
            false => PathEdit::Full(format!("/{path}")),
        });
    full.or_else(|| change.replace_prefix_match.clone().map(PathEdit::Prefix))
}

fn redirect(spec: &RedirectSpec) -> Result<Redirect, Problem> {
    let code = spec.status_code.unwrap_or(302);
    Ok(Redirect {
        scheme: match spec.scheme.as_deref() {
            None => None,
            Some("http") => Some("http"),
            Some("https") => Some("https"),
            Some(other) => {
                return Err(unsupported(format!(
                    "a redirect to the scheme {other} is not supported"
                )));
            }
        },
        host: spec.hostname.clone(),
        path: spec.path.as_ref().and_then(path_edit),
        port: spec.port,
        status: StatusCode::from_u16(code)
            .map_err(|_| unsupported(format!("a redirect with status {code} is not supported")))?,
    })
}

fn regex(text: &str) -> Result<Regex, Problem> {
    let built = RegexBuilder::new(&format!("^(?:{text})$"))
        .size_limit(MAX_REGEX)
        .build();
    built.map_err(|error| unsupported(format!("the expression {text:?} cannot be used: {error}")))
}

fn text_rule(type_: Option<&str>, value: &str) -> Result<TextRule, Problem> {
    match type_ {
        None | Some("Exact") => Ok(TextRule::Exact(value.to_owned())),
        Some("RegularExpression") => regex(value).map(TextRule::Regex),
        Some(other) => Err(unsupported(format!("matches of type {other} are not supported"))),
    }
}

/// Of several rules for one header, the first holds.
fn header_rules(list: &[NamedMatch]) -> Result<Vec<(HeaderName, TextRule)>, Problem> {
    let mut rules: Vec<(HeaderName, TextRule)> = Vec::new();
    for each in list {
        let name = header_name(&each.name)?;
        if !rules.iter().any(|(other, _)| *other == name) {
            rules.push((name, text_rule(each.type_.as_deref(), &each.value)?));
        }
    }
    Ok(rules)
}

fn http_match(spec: &HttpMatch) -> Result<Match, Problem> {
    let path = spec.path.clone().unwrap_or_default();
    let value = path.value.as_deref().unwrap_or("/");
    let mut query: Vec<(String, TextRule)> = Vec::new();
    for each in &spec.query_params {
        if !query.iter().any(|(name, _)| *name == each.name) {
            query.push((each.name.clone(), text_rule(each.type_.as_deref(), &each.value)?));
        }
    }
    Ok(Match {
        path: match path.type_.as_deref() {
            None | Some("PathPrefix") => PathRule::prefix(value),
            Some("Exact") => PathRule::Exact(value.to_owned()),
            Some("RegularExpression") => PathRule::Regex(regex(value)?),
            Some(other) => return Err(unsupported(format!("paths of type {other} are not supported"))),
        },
        method: match &spec.method {
            None => None,
            Some(name) => {
                let method = Method::from_bytes(name.as_bytes());
                Some(method.map_err(|_| unsupported(format!("the method {name} is not supported")))?)
            }
        },
        headers: header_rules(&spec.headers)?,
        query,
    })
}

fn grpc_match(spec: &GrpcMatch) -> Result<Match, Problem> {
    let GrpcMethod {
        type_,
        service,
        method,
    } = spec.method.clone().unwrap_or_default();
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let path = match (type_.as_deref(), given(service), given(method)) {
        (_, None, None) => PathRule::prefix("/"),
        (None | Some("Exact"), Some(service), Some(method)) => {
            PathRule::Exact(format!("/{service}/{method}"))
        }
        (None | Some("Exact"), Some(service), None) => PathRule::prefix(&format!("/{service}")),
        (None | Some("Exact"), None, Some(method)) => PathRule::GrpcMethod(method),
        (Some("RegularExpression"), service, method) => {
            let any = || "[^/]+".to_owned();
            let (service, method) = (service.unwrap_or_else(any), method.unwrap_or_else(any));
            PathRule::Regex(regex(&format!("/(?:{service})/(?:{method})"))?)
        }
        (Some(other), _, _) => return Err(unsupported(format!("methods of type {other} are not supported"))),
    };
    Ok(Match {
        path,
        method: None,
        headers: header_rules(&spec.headers)?,
        query: Vec::new(),
    })
}

fn retry(spec: &RetrySpec) -> Result<Retry, Problem> {
    let attempts = usize::try_from(spec.attempts.unwrap_or(1)).unwrap_or(usize::MAX);
    Ok(Retry {
        attempts: attempts.min(MAX_RETRIES),
        backoff: spec.backoff.as_deref().map(duration).transpose()?,
        codes: spec.codes.clone(),
    })
}

/// Such as `1h30m` or `500ms`.
fn duration(text: &str) -> Result<Duration, Problem> {
    let wrong = || unsupported(format!("{text:?} is not a duration"));
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u32 = rest[..end].parse().map_err(|_| wrong())?;
        rest = &rest[end..];
        let units = [
            ("ms", Duration::from_millis(1)),
            ("h", Duration::from_secs(3600)),
            ("m", Duration::from_secs(60)),
            ("s", Duration::from_secs(1)),
        ];
        let unit = units.iter().find(|(unit, _)| rest.starts_with(unit));
        let (unit, length) = unit.ok_or_else(wrong)?;
        rest = &rest[unit.len()..];
        total = total.saturating_add(length.saturating_mul(number));
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, expected) in [
            ("0s", Some(0)),
            ("500ms", Some(500)),
            ("1h30m", Some(5_400_000)),
            ("1m1s1ms", Some(61_001)),
            ("5", None),
            ("s", None),
            ("1d", None),
        ] {
            let found = duration(text).ok().map(|time| time.as_millis());
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn grants_name_both_sides() {
        let grant = serde_json::from_value::<ReferenceGrant>(serde_json::json!({
            "metadata": {"name": "g", "namespace": "there"},
            "spec": {
                "from": [{"group": GROUP, "kind": "HTTPRoute", "namespace": "here"}],
                "to": [{"group": "", "kind": "Service", "name": "one"}, {"group": "", "kind": "Secret"}],
            },
        }));
        let grants = [Arc::new(grant.expect("a grant"))];
        for (from, kind, to, expected) in [
            (("HTTPRoute", "here"), "Service", ("there", "one"), true),
            (("HTTPRoute", "here"), "Service", ("there", "two"), false),
            (("HTTPRoute", "here"), "Secret", ("there", "any"), true),
            (("GRPCRoute", "here"), "Service", ("there", "one"), false),
            (("HTTPRoute", "elsewhere"), "Service", ("there", "one"), false),
            (("HTTPRoute", "here"), "Service", ("elsewhere", "one"), false),
        ] {
            assert_eq!(
                is_granted(&grants, from, kind, to),
                expected,
                "{from:?} {kind} {to:?}"
            );
        }
    }
}
