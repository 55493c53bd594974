//! Which requests a webhook or policy is for: its rules, its selectors, and whether another version of the same
//! object counts.

use std::sync::Arc;

use serde_json::Value;
use skiff_admission::{Attributes, Operation};
use skiff_meta::Status;
use skiff_meta::selector::LabelSelector;
use skiff_registry::{ReadAt, Registry, Resource, object};

/// One rule: every list must have the request's word or `*`.
struct Rule {
    operations: Vec<String>,
    groups: Vec<String>,
    versions: Vec<String>,
    /// `pods`, `pods/*`, `*/scale`, split at the slash.
    resources: Vec<(String, String)>,
    scope: Scope,
    /// Empty: every name.
    names: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    All,
    Cluster,
    Namespaced,
}

/// What a configuration is for.
pub struct Matching {
    rules: Vec<Rule>,
    excluded: Vec<Rule>,
    namespaces: LabelSelector,
    objects: LabelSelector,
    /// A rule may be met by another version of the object.
    equivalent: bool,
    /// Without rules, the selectors alone decide.
    open: bool,
}

/// A request as rules see it, perhaps in another version than it came in.
struct RequestedResource<'a> {
    group: &'a str,
    version: &'a str,
    resource: &'a str,
}

fn texts(value: &Value, key: &str) -> Vec<String> {
    let list = value.get(key).and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(|text| text.as_str().map(str::to_owned))
        .collect()
}

impl Rule {
    fn read(value: &Value) -> Rule {
        Rule {
            operations: texts(value, "operations"),
            groups: texts(value, "apiGroups"),
            versions: texts(value, "apiVersions"),
            resources: texts(value, "resources")
                .iter()
                .map(|text| {
                    let (resource, subresource) = text.split_once('/').unwrap_or((text, ""));
                    (resource.to_owned(), subresource.to_owned())
                })
                .collect(),
            scope: match object::at_str(value, &["scope"]) {
                "Cluster" => Scope::Cluster,
                "Namespaced" => Scope::Namespaced,
                _ => Scope::All,
            },
            names: texts(value, "resourceNames"),
        }
    }

    fn matches(&self, asked: &RequestedResource<'_>, attributes: &Attributes<'_>) -> bool {
        let has = |list: &[String], word: &str| list.iter().any(|item| item == "*" || item == word);
        // The request for a namespace has its name for a namespace, and is still no namespaced one.
        let of_namespace = asked.group.is_empty() && asked.resource == "namespaces";
        let namespaced = !attributes.namespace.is_empty() && !of_namespace;
        let in_scope = match self.scope {
            Scope::All => true,
            Scope::Cluster => !namespaced,
            Scope::Namespaced => namespaced,
        };
        in_scope
            && has(&self.operations, attributes.operation.as_str())
            && has(&self.groups, asked.group)
            && has(&self.versions, asked.version)
            && self.resources.iter().any(|(resource, subresource)| {
                (resource == "*" || resource == asked.resource)
                    && (subresource == "*" || subresource == attributes.subresource)
            })
            && (self.names.is_empty() || self.names.iter().any(|name| name == attributes.name))
    }
}

impl Matching {
    /// Reads a webhook, or the `matchConstraints` of a policy.
    pub fn read(value: &Value) -> Matching {
        let rules = |key: &str| -> Vec<Rule> {
            let list = value.get(key).and_then(Value::as_array);
            list.into_iter().flatten().map(Rule::read).collect()
        };
        let selector = |key: &str| {
            let given = value.get(key).filter(|given| !given.is_null());
            // What cannot be parsed was refused when it was written.
            given.map_or_else(LabelSelector::default, |given| {
                LabelSelector::from_value(given).unwrap_or_default()
            })
        };
        let mut of_rules = rules("rules");
        of_rules.extend(rules("resourceRules"));
        Matching {
            rules: of_rules,
            excluded: rules("excludeResourceRules"),
            namespaces: selector("namespaceSelector"),
            objects: selector("objectSelector"),
            equivalent: object::at_str(value, &["matchPolicy"]) != "Exact",
            open: false,
        }
    }

    /// Reads the `matchResources` of a binding, which only narrow what the policy is for.
    pub fn read_binding(value: &Value) -> Matching {
        let mut matching = Matching::read(value);
        matching.open = matching.rules.is_empty();
        matching
    }

    /// The resource in whose version the request matches; `None` if it does not.
    pub async fn find(
        &self,
        registry: &Registry,
        attributes: &Attributes<'_>,
    ) -> Result<Option<Arc<Resource>>, Status> {
        let Some(resource) = self.by_rules(registry, attributes) else {
            return Ok(None);
        };
        let selected = self.by_object(attributes) && self.by_namespace(registry, attributes).await?;
        Ok(selected.then_some(resource))
    }

    fn by_rules(&self, registry: &Registry, attributes: &Attributes<'_>) -> Option<Arc<Resource>> {
        let own = registry
            .resources
            .find(attributes.group, attributes.version, attributes.resource)?;
        let asked = |resource: &Resource| RequestedResource {
            group: resource.facts.group,
            version: resource.facts.version,
            resource: resource.facts.plural,
        };
        let met = |rules: &[Rule]| -> Option<Arc<Resource>> {
            if rules.iter().any(|rule| rule.matches(&asked(&own), attributes)) {
                return Some(own.clone());
            }
            if !self.equivalent || rules.is_empty() {
                return None;
            }
            let others = equivalents(registry, &own, attributes.subresource);
            rules.iter().find_map(|rule| {
                let found = others.iter().find(|r| rule.matches(&asked(r), attributes));
                found.cloned()
            })
        };
        if met(&self.excluded).is_some() {
            return None;
        }
        if self.open {
            return Some(own.clone());
        }
        met(&self.rules)
    }

    fn by_object(&self, attributes: &Attributes<'_>) -> bool {
        if self.objects == LabelSelector::default() {
            return true;
        }
        let labels = |value: &Value| {
            let labels = object::at(value, &["metadata", "labels"]).unwrap_or(&Value::Null);
            value.get("metadata").is_some() && self.objects.matches_value(labels)
        };
        attributes.object.as_deref().is_some_and(labels) || attributes.old_object.is_some_and(labels)
    }

    async fn by_namespace(&self, registry: &Registry, attributes: &Attributes<'_>) -> Result<bool, Status> {
        if self.namespaces == LabelSelector::default() {
            return Ok(true);
        }
        let of_namespace = attributes.group.is_empty() && attributes.resource == "namespaces";
        let labels = |value: &Value| {
            let labels = object::at(value, &["metadata", "labels"]).unwrap_or(&Value::Null);
            self.namespaces.matches_value(labels)
        };
        // A namespace that is being written is not what the cache has.
        let written = matches!(attributes.operation, Operation::Create | Operation::Update);
        if of_namespace && attributes.subresource.is_empty() && written {
            return Ok(attributes.object.as_deref().is_some_and(labels));
        }
        if attributes.namespace.is_empty() {
            return Ok(!of_namespace);
        }
        let namespace = namespace(registry, attributes.namespace).await?;
        Ok(labels(&namespace))
    }
}

/// A namespace, from the store if the cache does not have it yet.
pub async fn namespace(registry: &Registry, name: &str) -> Result<Value, Status> {
    let namespaces = registry
        .resources
        .get("", "v1", "namespaces")
        .ok_or_else(|| Status::internal("no resource namespaces"))?;
    for at in [ReadAt::Any, ReadAt::Latest] {
        if let Some(found) = registry.get(namespaces, "", name, at).await? {
            return Ok(found);
        }
    }
    Err(Status::not_found(&namespaces.group_resource, name))
}

/// The other resources that show the same objects.
fn equivalents(registry: &Registry, own: &Resource, subresource: &str) -> Vec<Arc<Resource>> {
    let mut all = registry.resources.equivalents(own);
    all.retain(|other| subresource.is_empty() || other.facts.subresource(subresource).is_some());
    all
}
