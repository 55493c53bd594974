//! Who lets an admission policy read parameters must be able to read them: else a policy's messages would tell what
//! its author may not see. Checked on every write of a policy with a `paramKind` and of a binding with a `paramRef`.

use serde_json::Value;
use skiff_auth::{Attributes, UserInfo};
use skiff_meta::{GroupKind, GroupVersionKind, Status, field};
use skiff_registry::{ReadAt, Resource, object};

use crate::dynamic::param_resource;
use crate::server::Inner;

const GROUP: &str = "admissionregistration.k8s.io";
const ANY: &str = "*";

/// Checks a write of `new` over `old`. Other kinds pass.
pub async fn check(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    new: &Value,
    old: Option<&Value>,
) -> Result<(), Status> {
    if resource.facts.group != GROUP || user.in_group(skiff_auth::MASTERS_GROUP) {
        return Ok(());
    }
    let unchanged = |path: &[&str]| old.is_some_and(|old| object::at(old, path) == object::at(new, path));
    let (path, refused) = match resource.facts.plural {
        "validatingadmissionpolicies" | "mutatingadmissionpolicies" => {
            let path = ["spec", "paramKind"];
            match object::at(new, &path).filter(|kind| !kind.is_null()) {
                Some(kind) if !unchanged(&path) => (path, of_policy(inner, user, kind).await),
                _ => return Ok(()),
            }
        }
        "validatingadmissionpolicybindings" | "mutatingadmissionpolicybindings" => {
            let path = ["spec", "paramRef"];
            let is_same = unchanged(&path) && unchanged(&["spec", "policyName"]);
            match object::at(new, &path).filter(|reference| !reference.is_null()) {
                Some(reference) if !is_same => {
                    (path, of_binding(inner, user, resource, new, reference).await?)
                }
                _ => return Ok(()),
            }
        }
        _ => return Ok(()),
    };
    match refused {
        Some(why) => {
            let error = field::Error::forbidden(&field::Path::new(&path.join(".")), why);
            let kind = GroupKind::new(GROUP, resource.facts.kind);
            Err(Status::invalid(&kind, object::name(new), &[error]))
        }
        None => Ok(()),
    }
}

/// Group, version and resource of a parameter's kind, as far as they are known.
struct Parameters {
    group: String,
    version: String,
    resource: String,
    resolved: bool,
}

fn parameters(inner: &Inner, kind: &Value) -> Parameters {
    let text = |name: &str| kind[name].as_str().unwrap_or_default();
    let api_version = text("apiVersion");
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let gvk = GroupVersionKind::new(group, version, text("kind"));
    let found = param_resource(&inner.registry, &gvk);
    Parameters {
        group: group.to_owned(),
        version: version.to_owned(),
        resolved: found.is_some(),
        resource: found.map_or_else(|| ANY.to_owned(), |resource| resource.plural.clone()),
    }
}

async fn allowed(
    inner: &Inner,
    user: &UserInfo,
    verb: &str,
    parameters: &Parameters,
    (namespace, name): (&str, &str),
) -> bool {
    let attributes = Attributes {
        verb,
        is_resource: true,
        group: &parameters.group,
        version: &parameters.version,
        resource: &parameters.resource,
        namespace,
        name,
        ..Attributes::default()
    };
    inner.authorizer.decide(user, &attributes, false).await.allowed
}

async fn of_policy(inner: &Inner, user: &UserInfo, kind: &Value) -> Option<String> {
    if allowed(inner, user, "get", &parameters(inner, kind), (ANY, ANY)).await {
        return None;
    }
    let text = |name: &str| kind[name].as_str().unwrap_or_default();
    Some(format!(
        "user {} must have \"get\" permission on all objects of the referenced paramKind (kind={}, apiVersion={})",
        shown(user),
        text("kind"),
        text("apiVersion")
    ))
}

async fn of_binding(
    inner: &Inner,
    user: &UserInfo,
    resource: &Resource,
    binding: &Value,
    reference: &Value,
) -> Result<Option<String>, Status> {
    let policies = match resource.facts.plural {
        "validatingadmissionpolicybindings" => "validatingadmissionpolicies",
        _ => "mutatingadmissionpolicies",
    };
    let policy_name = object::at_str(binding, &["spec", "policyName"]);
    let policy = match inner
        .registry
        .resources
        .get(GROUP, resource.facts.version, policies)
    {
        Some(policies) => {
            inner
                .registry
                .get(policies, "", policy_name, ReadAt::Latest)
                .await?
        }
        None => None,
    };
    let kind = policy
        .as_ref()
        .and_then(|policy| object::at(policy, &["spec", "paramKind"]));
    let parameters = match kind.filter(|kind| !kind.is_null()) {
        Some(kind) => parameters(inner, kind),
        // Without its policy nobody knows what it may read.
        None => Parameters {
            group: ANY.to_owned(),
            version: ANY.to_owned(),
            resource: ANY.to_owned(),
            resolved: true,
        },
    };
    let text = |name: &str| reference[name].as_str().unwrap_or_default();
    let verb = if text("name").is_empty() { "list" } else { "get" };
    if allowed(inner, user, verb, &parameters, (text("namespace"), text("name"))).await {
        return Ok(None);
    }
    let user = shown(user);
    let everywhere =
        format!("and user {user} does not have \"{verb}\" permission for all groups, versions and resources");
    Ok(Some(match (&policy, kind) {
        (None, _) => {
            format!(
                "unable to get policy {policy_name} to determine minimum required permissions {everywhere}"
            )
        }
        (_, Some(kind)) if !parameters.resolved => {
            let part = |name: &str| kind[name].as_str().unwrap_or_default();
            format!(
                "unable to resolve paramKind &{{{} {}}} to determine minimum required permissions {everywhere}",
                part("apiVersion"),
                part("kind")
            )
        }
        _ => format!("user {user} does not have \"{verb}\" permission on the object referenced by paramRef"),
    }))
}

/// COMPAT: the user as Go prints it.
fn shown(user: &UserInfo) -> String {
    let extra: Vec<String> = user
        .extra
        .iter()
        .map(|(key, values)| format!("{key}:[{}]", values.join(" ")))
        .collect();
    format!(
        "&{{{} {} [{}] map[{}]}}",
        user.name,
        user.uid,
        user.groups.join(" "),
        extra.join(" ")
    )
}
