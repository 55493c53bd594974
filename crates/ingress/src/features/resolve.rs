//! From what an Ingress asks for to what its routes do: Secrets are read, and what is costly to make is kept from one
//! table to the next.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::networking::v1::Ingress;
use skiff_client::Key;

use super::affinity::Affinity;
use super::backend_tls::{BackendTls, TlsSpec};
use super::basic::{Basic, BasicSpec, Users};
use super::limits::{LimitSpec, Limits};
use super::rewrite::PathRegex;
use super::{Annotations, Features};
use crate::backend::Protocol;
use crate::compile::{Objects, Problem};

/// What was made before, with whether it was used since the last table.
struct Kept<K, V>(HashMap<K, (V, bool)>);

impl<K, V> Default for Kept<K, V> {
    fn default() -> Self {
        Kept(HashMap::new())
    }
}

impl<K: Hash + Eq, V: Clone> Kept<K, V> {
    fn get(&mut self, key: K, make: impl FnOnce() -> V) -> V {
        let (value, used) = self.0.entry(key).or_insert_with(|| (make(), true));
        *used = true;
        value.clone()
    }

    fn forget_unused(&mut self) {
        self.0.retain(|_, (_, used)| std::mem::take(used));
    }
}

/// Expressions of all Ingresses that are compiled; those of the Ingresses of one namespace.
pub const MAX_REGEXES: usize = 2048;
pub const MAX_NAMESPACE_REGEXES: usize = 256;
/// What those of one namespace may cost together (see `PathRegex::cost`): a request may be compared with all of them.
pub const MAX_NAMESPACE_COST: usize = 512 << 10;

/// Compiled expressions, by their text: namespaces share them.
#[derive(Default)]
struct Regexes {
    kept: Kept<String, Result<Arc<PathRegex>, String>>,
    /// Of the table that is being made.
    used: HashSet<String>,
    /// By namespace, with what they cost together.
    used_by: HashMap<String, (HashSet<String>, usize)>,
}

impl Regexes {
    fn get(&mut self, namespace: &str, text: &str) -> Result<Arc<PathRegex>, String> {
        let (own, cost) = self.used_by.entry(namespace.to_owned()).or_default();
        let is_new = !own.contains(text);
        if is_new {
            if own.len() >= MAX_NAMESPACE_REGEXES {
                return Err(format!(
                    "the Ingresses of its namespace have more than {MAX_NAMESPACE_REGEXES} expressions"
                ));
            }
            if self.used.len() >= MAX_REGEXES && !self.used.contains(text) {
                return Err(format!("all Ingresses have more than {MAX_REGEXES} expressions"));
            }
        }
        let make = || PathRegex::new(text).map(Arc::new);
        let regex = self.kept.get(text.to_owned(), make)?;
        if is_new {
            if *cost + regex.cost > MAX_NAMESPACE_COST {
                return Err("the expressions of its namespace are too large together".to_owned());
            }
            *cost += regex.cost;
        }
        own.insert(text.to_owned());
        self.used.insert(text.to_owned());
        Ok(regex)
    }

    fn forget_unused(&mut self) {
        self.kept.forget_unused();
        self.used.clear();
        self.used_by.clear();
    }
}

type ReadUsers = Result<(Arc<Users>, Vec<String>), String>;

#[derive(Default)]
pub struct FeatureCache {
    regexes: Regexes,
    /// By the Secret, how it is read, and its version.
    users: Kept<(Key, bool, String), ReadUsers>,
    /// By the Ingress and what it asks for: counts outlive a table.
    limits: Kept<(Key, String), Arc<Limits>>,
    tls: Kept<(Key, String), Result<Arc<BackendTls>, String>>,
}

impl FeatureCache {
    pub fn forget_unused(&mut self) {
        self.regexes.forget_unused();
        self.users.forget_unused();
        self.limits.forget_unused();
        self.tls.forget_unused();
    }

    /// `namespace` is the Ingress'.
    pub fn regex(&mut self, namespace: &str, text: &str) -> Result<Arc<PathRegex>, String> {
        self.regexes.get(namespace, text)
    }

    fn limits(&mut self, ingress: Key, spec: &LimitSpec) -> Arc<Limits> {
        let make = || Arc::new(Limits::new(spec.clone()));
        self.limits.get((ingress, format!("{spec:?}")), make)
    }

    /// How the endpoints of a Service are spoken to in TLS. `namespace` is the Ingress'.
    pub fn tls(
        &mut self,
        objects: &dyn Objects,
        namespace: &str,
        service: &str,
        spec: &TlsSpec,
        protocol: Protocol,
    ) -> Result<Arc<BackendTls>, String> {
        let secret = match &spec.secret {
            None => None,
            Some(name) => Some(
                objects
                    .any_secret(namespace, name)
                    .ok_or_else(|| no_secret(name))?,
            ),
        };
        let (secret, name) = (secret.as_deref(), format!("{service}.{namespace}.svc"));
        let key = Key::new(namespace, spec.secret.as_deref().unwrap_or_default());
        let id = spec.id(secret, &name, protocol);
        let make = || {
            let built = spec.build(secret, &name, protocol).map(Arc::new);
            built.map_err(|why| match &spec.secret {
                Some(secret) => format!("Secret {secret} is not used: {why}"),
                None => why,
            })
        };
        self.tls.get((key, id), make)
    }

    /// The users of a Secret, with what of it cannot be used.
    fn users(&mut self, key: Key, secret: &Secret, is_map: bool) -> ReadUsers {
        let version = secret.metadata.resource_version.clone().unwrap_or_default();
        self.users.get((key, is_map, version), || {
            Users::read(secret, is_map).map(|(users, problems)| (Arc::new(users), problems))
        })
    }

    fn basic(
        &mut self,
        objects: &dyn Objects,
        namespace: &str,
        spec: &BasicSpec,
        problems: &mut Vec<Problem>,
    ) -> Option<Basic> {
        let name = &spec.secret;
        let found = match objects.any_secret(namespace, name) {
            None => Err(no_secret(name)),
            Some(secret) => self.users(Key::new(namespace, name), &secret, spec.is_map),
        };
        let (users, unusable) = match found {
            Ok(found) => found,
            Err(why) => {
                let message = format!(
                    "the Ingress is answered with 503, for its users cannot be read: Secret {name}: {why}"
                );
                problems.push(Problem {
                    reason: "BadAuthSecret",
                    message,
                });
                return None;
            }
        };
        problems.extend(unusable.into_iter().map(|why| Problem {
            reason: "BadAuthSecret",
            message: format!("Secret {name}: {why}"),
        }));
        Some(Basic {
            users,
            challenge: spec.challenge.clone(),
        })
    }

    /// What all routes of an Ingress have in common; those of external authentication are added by the compiler.
    pub fn features(
        &mut self,
        objects: &dyn Objects,
        ingress: &Ingress,
        asked: &Annotations,
        problems: &mut Vec<Problem>,
    ) -> Features {
        let meta = &ingress.metadata;
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let key = Key::new(namespace, meta.name.as_deref().unwrap_or_default());
        let basic = asked
            .basic
            .as_ref()
            .map(|spec| self.basic(objects, namespace, spec, problems));
        Features {
            closed: asked.closed || basic.as_ref().is_some_and(Option::is_none),
            redirect: asked.redirect.clone(),
            cors: asked.cors.clone(),
            ranges: asked.ranges.clone(),
            limits: asked.limits.as_ref().map(|spec| self.limits(key, spec)),
            basic: basic.flatten(),
            external: None,
            affinity: None,
            canary: None,
            host: asked.host.clone(),
            prefix: asked.prefix.clone(),
            rewrite: None,
        }
    }
}

fn no_secret(name: &str) -> String {
    format!("there is no Secret {name} of type Opaque or kubernetes.io/tls")
}

/// Of the route with this path.
pub fn of_path(
    shared: &Features,
    ingress: &Ingress,
    asked: &Annotations,
    path: &str,
) -> Option<Arc<Features>> {
    let mut features = shared.clone();
    let salt = ingress.metadata.uid.as_deref().unwrap_or_default();
    features.affinity = asked.affinity.clone().map(|spec| Affinity::new(spec, path, salt));
    features.rewrite = asked.rewrite_of(path).cloned();
    (!features.is_empty()).then(|| Arc::new(features))
}
