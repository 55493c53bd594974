//! From objects of the API to a route table and certificates. It reads no clock and writes nothing: whatever cannot be
//! acted on is returned as a problem of its Ingress.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Secret, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{HTTPIngressPath, Ingress, IngressClass};
use rustls::sign::CertifiedKey;
use skiff_client::Key;

use crate::backend::{Backend, Backends};
use crate::endpoints::AddressPolicy;
use crate::features::canary::{Canary, CanarySpec};
use crate::features::external::External;
use crate::features::resolve::{self, FeatureCache};
use crate::features::{Annotations, Features, rewrite};
use crate::table::{HostMatch, PathKey, PathMatch, Route, RouteOptions, RouteTable};
use crate::tls::Certificates;

/// The controller that an IngressClass names.
pub const CONTROLLER: &str = "skiff.io/ingress";
/// How Ingresses named their class before there was a field for it.
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";

/// Where objects are looked up.
pub trait Objects {
    fn ingresses(&self) -> Vec<Arc<Ingress>>;
    fn classes(&self) -> Vec<Arc<IngressClass>>;
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>>;
    /// Of type `kubernetes.io/tls`.
    fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>>;
    /// Of this type, or of type `Opaque`.
    fn any_secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.secret(namespace, name)
    }
}

/// Something of an Ingress that is not acted on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Problem {
    /// Of the event.
    pub reason: &'static str,
    pub message: String,
}

#[derive(Default)]
pub struct Compiled {
    pub table: RouteTable,
    pub certificates: Certificates,
    /// The Ingresses that are served here, with their problems.
    pub ingresses: Vec<(Arc<Ingress>, Vec<Problem>)>,
}

/// Certificates that were read before, by their Secret and its version.
#[derive(Default)]
pub struct CertificateCache(HashMap<Key, CachedCertificate>);

struct CachedCertificate {
    version: String,
    read: Result<Arc<CertifiedKey>, String>,
    used: bool,
}

impl CertificateCache {
    pub fn read(&mut self, key: Key, secret: &Secret) -> Result<Arc<CertifiedKey>, String> {
        let version = secret.metadata.resource_version.clone().unwrap_or_default();
        let cached = self.0.entry(key).or_insert_with(|| CachedCertificate {
            version: version.clone(),
            read: read_certificate(secret),
            used: true,
        });
        if cached.version != version {
            cached.read = read_certificate(secret);
            cached.version = version;
        }
        cached.used = true;
        cached.read.clone()
    }

    /// What nobody read since the last time.
    pub fn forget_unused(&mut self) {
        self.0.retain(|_, cached| std::mem::take(&mut cached.used));
    }
}

fn read_certificate(secret: &Secret) -> Result<Arc<CertifiedKey>, String> {
    let text = |name: &str| {
        let bytes = secret.data.as_ref().and_then(|data| data.get(name));
        let text = bytes.and_then(|bytes| String::from_utf8(bytes.0.clone()).ok());
        text.ok_or_else(|| format!("it has no {name}"))
    };
    let identity = skiff_pki::Identity {
        certificate: text("tls.crt")?,
        key: text("tls.key")?,
    };
    let certified = skiff_pki::certified(&identity).map_err(|error| error.to_string())?;
    match certified.cert.is_empty() {
        true => Err("tls.crt has no certificate".to_owned()),
        false => Ok(Arc::new(certified)),
    }
}

/// One run of the compiler.
pub struct Compiler<'a> {
    pub objects: &'a dyn Objects,
    pub policy: &'a AddressPolicy,
    pub backends: &'a mut Backends,
    pub cache: &'a mut CertificateCache,
    pub features: &'a mut FeatureCache,
    pub now: Instant,
}

impl Compiler<'_> {
    pub fn run(mut self) -> Compiled {
        let classes = self.objects.classes();
        let ours: Vec<&str> = classes
            .iter()
            .filter(|class| {
                class.spec.as_ref().and_then(|spec| spec.controller.as_deref()) == Some(CONTROLLER)
            })
            .filter_map(|class| class.metadata.name.as_deref())
            .collect();
        let mut ingresses = self.objects.ingresses();
        ingresses.retain(|ingress| class_of(ingress).is_some_and(|class| ours.contains(&class)));
        // Where two want the same, the older one has it.
        ingresses.sort_by_cached_key(|ingress| {
            let meta = &ingress.metadata;
            let created = meta.creation_timestamp.as_ref().map(|time| time.0);
            (created, meta.namespace.clone(), meta.name.clone())
        });
        let mut compiled = Compiled::default();
        let mut problems: Vec<Vec<Problem>> = ingresses
            .iter()
            .map(|ingress| self.certificates(ingress, &mut compiled.certificates))
            .collect();
        let asked: Vec<Annotations> = ingresses
            .iter()
            .zip(&mut problems)
            .map(|(ingress, problems)| Annotations::read(ingress, problems))
            .collect();
        let mut routes = Routes {
            regex_hosts: regex_hosts(&ingresses, &asked),
            owners: HashMap::new(),
        };
        for ((ingress, asked), problems) in ingresses.iter().zip(&asked).zip(&mut problems) {
            if asked.canary.is_none() {
                self.routes(ingress, asked, &mut routes, &mut compiled, problems);
            }
        }
        for ((ingress, asked), problems) in ingresses.iter().zip(&asked).zip(&mut problems) {
            if let Some(spec) = &asked.canary {
                self.canary(ingress, asked, spec, &mut routes, &mut compiled, problems);
            }
        }
        for ((ingress, asked), problems) in ingresses.iter().zip(&asked).zip(&mut problems) {
            aliases(ingress, asked, &mut compiled.table, problems);
        }
        for problems in &mut problems {
            problems.sort();
            problems.dedup();
        }
        compiled.ingresses = ingresses.into_iter().zip(problems).collect();
        compiled
    }

    fn certificates(&mut self, ingress: &Ingress, certificates: &mut Certificates) -> Vec<Problem> {
        let mut problems = Vec::new();
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let spec = ingress.spec.as_ref();
        for tls in spec.and_then(|spec| spec.tls.as_ref()).into_iter().flatten() {
            let Some(name) = tls.secret_name.as_deref().filter(|name| !name.is_empty()) else {
                continue;
            };
            let Some(secret) = self.objects.secret(namespace, name) else {
                problems.push(Problem {
                    reason: "CertificateNotFound",
                    message: format!("there is no Secret {name} of type kubernetes.io/tls; clients see the default certificate"),
                });
                continue;
            };
            let certificate = match self.cache.read(Key::new(namespace, name), &secret) {
                Ok(certificate) => certificate,
                Err(why) => {
                    problems.push(Problem {
                        reason: "BadCertificate",
                        message: format!(
                            "Secret {name} is not used: {why}; clients see the default certificate"
                        ),
                    });
                    continue;
                }
            };
            let hosts: Vec<HostMatch> = match tls.hosts.as_deref() {
                Some(hosts) if !hosts.is_empty() => hosts.iter().map(|host| HostMatch::parse(host)).collect(),
                _ => rule_hosts(ingress),
            };
            for host in hosts {
                // A second certificate of one host is no error: several Ingresses of a host name the same Secret.
                certificates.add(host, certificate.clone());
            }
        }
        problems
    }

    fn routes(
        &mut self,
        ingress: &Ingress,
        asked: &Annotations,
        routes: &mut Routes,
        compiled: &mut Compiled,
        problems: &mut Vec<Problem>,
    ) {
        let Some(spec) = &ingress.spec else { return };
        let namespace = ingress.metadata.namespace.as_deref().unwrap_or_default();
        let shared = self.shared(ingress, asked, problems);
        let rules = spec.rules.as_deref().unwrap_or_default();
        let default = spec.default_backend.as_ref();
        let default = default.map(|backend| self.backend(ingress, backend, asked, problems));
        let route = |path: PathMatch,
                     text: &str,
                     backend: Option<Arc<Backend>>,
                     host: &HostMatch,
                     certificates: &Certificates| {
            let has_tls = certificates.cover(host);
            let usual = RouteOptions::default();
            Route {
                path,
                backend,
                options: RouteOptions {
                    redirect_to_https: asked.force_ssl_redirect || (has_tls && asked.ssl_redirect),
                    max_body: asked.max_body,
                    connect_timeout: asked.connect_timeout.unwrap_or(usual.connect_timeout),
                    send_timeout: asked.send_timeout,
                    response_timeout: asked.read_timeout.or(usual.response_timeout),
                    silence: asked.read_timeout,
                    features: resolve::of_path(&shared, ingress, asked, text),
                    ..usual
                },
            }
        };
        for rule in rules {
            let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
            let host_name = rule.host.as_deref().unwrap_or("*");
            compiled.table.add_host(host.clone());
            if let Some(redirect) = &asked.app_root {
                let mut root = route(PathMatch::exact("/"), "/", None, &host, &compiled.certificates);
                root.options.features = Some(Arc::new(Features {
                    closed: shared.closed,
                    redirect: Some(redirect.clone()),
                    ..Features::default()
                }));
                let is_of_another = compiled.table.matching(&host, "/").any(|path| {
                    let owner = routes.owners.get(&(host.clone(), path.key()));
                    owner.is_some_and(|owner| owner != namespace)
                });
                if is_of_another || !compiled.table.set_root(host.clone(), root) {
                    problems.push(Problem {
                        reason: "RouteTaken",
                        message: format!("an older Ingress has / or the app-root of host {host_name}"),
                    });
                }
            }
            let paths = rule.http.iter().flat_map(|http| &http.paths);
            for path in paths {
                let text = path_text(path);
                let matched = match self.path_match(namespace, &host, path, routes) {
                    Ok(matched) => matched,
                    Err(why) => {
                        let mut message = format!("the path {text} of host {host_name} is not served: {why}");
                        if shared.restricts() {
                            // No other route may serve it to clients that this one would have refused.
                            let certificates = &compiled.certificates;
                            let mut route = route(reserved(text), text, None, &host, certificates);
                            route.options.features = Some(Arc::new(Features {
                                closed: true,
                                ..Features::default()
                            }));
                            compiled.table.add(host.clone(), route);
                            message +=
                                "; the Ingress restricts access, so what begins like it is answered with 503";
                        }
                        problems.push(Problem {
                            reason: "BadPath",
                            message,
                        });
                        continue;
                    }
                };
                let backend = self.backend(ingress, &path.backend, asked, problems);
                let route = route(matched.clone(), text, backend, &host, &compiled.certificates);
                if compiled.table.add(host.clone(), route) {
                    let owner = routes.owners.entry((host.clone(), matched.key()));
                    owner.or_insert_with(|| namespace.to_owned());
                } else {
                    problems.push(Problem {
                        reason: "RouteTaken",
                        message: format!("an older Ingress has the path {text} of host {host_name}"),
                    });
                }
            }
        }
        let Some(default) = default else { return };
        let everything =
            |host: &HostMatch, features: &mut FeatureCache| match routes.has_regexes(host, namespace) {
                true => features
                    .regex(namespace, "/")
                    .map_or(PathMatch::prefix("/"), PathMatch::Regex),
                false => PathMatch::prefix("/"),
            };
        for rule in rules {
            let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
            let all = everything(&host, &mut *self.features);
            let route = route(all, "/", default.clone(), &host, &compiled.certificates);
            // If there is a route for `/`, nothing is left for the default backend.
            compiled.table.add(host, route);
        }
        let all = everything(&HostMatch::Any, &mut *self.features);
        let fallback = route(all, "/", default, &HostMatch::Any, &compiled.certificates);
        if rules.is_empty() && !compiled.table.set_fallback(fallback) {
            problems.push(Problem {
                reason: "RouteTaken",
                message: "an older Ingress without rules has the default backend".to_owned(),
            });
        }
    }

    fn path_match(
        &mut self,
        namespace: &str,
        host: &HostMatch,
        path: &HTTPIngressPath,
        routes: &Routes,
    ) -> Result<PathMatch, String> {
        let text = path_text(path);
        if routes.has_regexes(host, namespace) {
            return self.features.regex(namespace, text).map(PathMatch::Regex);
        }
        // Without a type of its own, `ImplementationSpecific` is a prefix here.
        Ok(match path.path_type.as_str() {
            "Exact" => PathMatch::exact(text),
            _ => PathMatch::prefix(text),
        })
    }

    /// What the routes of an Ingress have in common.
    fn shared(&mut self, ingress: &Ingress, asked: &Annotations, problems: &mut Vec<Problem>) -> Features {
        let mut shared = self.features.features(self.objects, ingress, asked, problems);
        let Some(spec) = &asked.external else {
            return shared;
        };
        match self.auth_backend(ingress, spec, problems) {
            Ok(backend) => {
                shared.external = Some(External {
                    spec: spec.clone(),
                    backend,
                });
            }
            Err(Problem { message, .. }) => {
                shared.closed = true;
                problems.push(Problem {
                    reason: "BadAuthService",
                    message: format!(
                        "the Ingress is answered with 503, for its auth-url cannot be asked: {message}"
                    ),
                });
            }
        }
        shared
    }

    /// Gives routes that others have made a second backend.
    fn canary(
        &mut self,
        ingress: &Ingress,
        asked: &Annotations,
        spec: &CanarySpec,
        routes: &mut Routes,
        compiled: &mut Compiled,
        problems: &mut Vec<Problem>,
    ) {
        let namespace = ingress.metadata.namespace.clone().unwrap_or_default();
        let rules = ingress.spec.iter().flat_map(|spec| spec.rules.iter().flatten());
        for rule in rules {
            let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
            for path in rule.http.iter().flat_map(|http| &http.paths) {
                let text = path_text(path);
                // Its share is answered with 503 if what the Ingress asks for cannot be enforced.
                let backend = match asked.closed {
                    true => None,
                    false => self.backend(ingress, &path.backend, asked, problems),
                };
                let matched = self.path_match(&namespace, &host, path, routes).ok();
                let owns = |matched: &PathMatch| {
                    routes.owners.get(&(host.clone(), matched.key())) == Some(&namespace)
                };
                let route = matched.filter(owns);
                let route = route.and_then(|matched| compiled.table.route_mut(&host, &matched));
                let features = route.map(|route| route.options.features.get_or_insert_default());
                let features = features
                    .map(Arc::make_mut)
                    .filter(|features| features.canary.is_none());
                match features {
                    Some(features) => {
                        features.canary = Some(Canary {
                            spec: spec.clone(),
                            backend,
                        });
                    }
                    None => problems.push(Problem {
                        reason: "CanaryNotServed",
                        message: format!(
                            "no other Ingress of the namespace has the path {text} of host {}, or it has a canary",
                            rule.host.as_deref().unwrap_or("*")
                        ),
                    }),
                }
            }
        }
    }
}

/// What the compiler knows of the routes beside the table.
struct Routes {
    /// Where all paths of a namespace are expressions, because one is. With ingress-nginx those of other namespaces would become
    /// expressions too, and match more than their authors wrote.
    regex_hosts: HashSet<(HostMatch, String)>,
    /// The namespace of the Ingress that has a path of a host.
    owners: HashMap<(HostMatch, PathKey), String>,
}

impl Routes {
    fn has_regexes(&self, host: &HostMatch, namespace: &str) -> bool {
        self.regex_hosts.contains(&(host.clone(), namespace.to_owned()))
    }
}

/// What an expression that cannot be used could match.
fn reserved(text: &str) -> PathMatch {
    PathMatch::Reserved {
        text: text.to_owned(),
        beginnings: rewrite::beginnings(text),
    }
}

fn path_text(path: &HTTPIngressPath) -> &str {
    path.path
        .as_deref()
        .filter(|text| !text.is_empty())
        .unwrap_or("/")
}

/// The hosts of which an Ingress has expressions or rewrites, each with the Ingress' namespace.
fn regex_hosts(ingresses: &[Arc<Ingress>], asked: &[Annotations]) -> HashSet<(HostMatch, String)> {
    let mut hosts = HashSet::new();
    for (ingress, asked) in ingresses
        .iter()
        .zip(asked)
        .filter(|(_, asked)| asked.canary.is_none())
    {
        let namespace = ingress.metadata.namespace.clone().unwrap_or_default();
        let rules = ingress.spec.iter().flat_map(|spec| spec.rules.iter().flatten());
        let has_regex =
            |path: &HTTPIngressPath| asked.use_regex || asked.rewrite_of(path_text(path)).is_some();
        let has_rules = ingress
            .spec
            .as_ref()
            .is_some_and(|spec| spec.rules.as_ref().is_some_and(|rules| !rules.is_empty()));
        for rule in rules {
            let mut paths = rule.http.iter().flat_map(|http| &http.paths);
            if paths.any(has_regex) {
                let host = HostMatch::parse(rule.host.as_deref().unwrap_or_default());
                hosts.insert((host, namespace.clone()));
            }
        }
        if !has_rules && (asked.use_regex || asked.rewrite_of("/").is_some()) {
            hosts.insert((HostMatch::Any, namespace));
        }
    }
    hosts
}

/// Serves the hosts of an Ingress under other names too.
fn aliases(ingress: &Ingress, asked: &Annotations, table: &mut RouteTable, problems: &mut Vec<Problem>) {
    let Some(host) = rule_hosts(ingress).into_iter().next() else {
        return;
    };
    for alias in &asked.aliases {
        if !table.add_alias(alias.clone(), &host) {
            problems.push(Problem {
                reason: "RouteTaken",
                message: format!("the alias {alias} is the host of an Ingress, or an alias already"),
            });
        }
    }
}

/// The class that an Ingress names.
fn class_of(ingress: &Ingress) -> Option<&str> {
    let by_field = ingress
        .spec
        .as_ref()
        .and_then(|spec| spec.ingress_class_name.as_deref());
    let annotations = ingress.metadata.annotations.as_ref();
    by_field.or_else(|| annotations?.get(CLASS_ANNOTATION).map(String::as_str))
}

fn rule_hosts(ingress: &Ingress) -> Vec<HostMatch> {
    let rules = ingress.spec.iter().flat_map(|spec| spec.rules.iter().flatten());
    let hosts: Vec<HostMatch> = rules
        .map(|rule| HostMatch::parse(rule.host.as_deref().unwrap_or_default()))
        .collect();
    match hosts.is_empty() {
        true => vec![HostMatch::Any],
        false => hosts,
    }
}
