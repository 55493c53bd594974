//! The scale subresource of any kind, built in or custom: found by discovery, read and written as `autoscaling/v1`
//! Scale.
//!
//! Names, groups and versions come from references that users write, so each becomes exactly one segment of a path.

use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{APIGroup, APIResourceList};
use kube::Client;
use skiff_client::ErrorExt;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ScaleError {
    #[error("{}", crate::error_message(.0))]
    Api(#[from] kube::Error),
    #[error("unexpected GroupVersion string: {0}")]
    GroupVersion(String),
    #[error("no matches for kind {kind:?} in {place}")]
    NoMatch { kind: String, place: String },
    #[error("invalid resource name {name:?}: [{why}]")]
    Name { name: String, why: &'static str },
    #[error("{0} does not implement the scale subresource")]
    NoScale(String),
}

impl ScaleError {
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, ScaleError::Api(error) if is_absent(error))
    }

    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, ScaleError::Api(error) if error.is_conflict())
    }
}

/// Also where nobody serves the path, and the answer is no Status.
pub(crate) fn is_absent(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Group and version of an `apiVersion`; the core group is empty.
pub(crate) fn parse_group_version(text: &str) -> Result<(&str, &str), ScaleError> {
    match text.split_once('/') {
        None => Ok(("", text)),
        Some((group, version)) if !version.contains('/') => Ok((group, version)),
        Some(_) => Err(ScaleError::GroupVersion(text.to_owned())),
    }
}

/// `deployments.apps`; `replicationcontrollers` in the core group.
pub(crate) fn group_resource(group: &str, plural: &str) -> String {
    if group.is_empty() {
        plural.to_owned()
    } else {
        format!("{plural}.{group}")
    }
}

/// One segment of a path, or why it cannot be one.
fn segment(text: &str) -> Result<String, ScaleError> {
    let refused = |why| {
        Err(ScaleError::Name {
            name: text.to_owned(),
            why,
        })
    };
    match text {
        "." => return refused("may not be '.'"),
        ".." => return refused("may not be '..'"),
        _ if text.contains('/') => return refused("may not contain '/'"),
        _ if text.contains('%') => return refused("may not contain '%'"),
        _ => {}
    }
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~*".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    Ok(encoded)
}

/// A path below the API's root out of segments that are encoded here.
pub(crate) fn path(segments: &[&str]) -> Result<String, ScaleError> {
    let mut path = String::new();
    for one in segments {
        path.push('/');
        path.push_str(&segment(one)?);
    }
    Ok(path)
}

pub(crate) fn request(
    method: http::Method,
    path: &str,
    body: Vec<u8>,
) -> Result<http::Request<Vec<u8>>, kube::Error> {
    let mut request = http::Request::builder().method(method).uri(path);
    if !body.is_empty() {
        request = request.header(http::header::CONTENT_TYPE, "application/json");
    }
    request.body(body).map_err(kube::Error::HttpError)
}

/// A resource, at a version that the server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScaleTarget {
    pub(crate) group: String,
    version: String,
    plural: String,
}

impl ScaleTarget {
    pub(crate) fn group_resource(&self) -> String {
        group_resource(&self.group, &self.plural)
    }

    /// The resource of a kind in exactly this version.
    pub(crate) async fn find(client: &Client, api_version: &str, kind: &str) -> Result<Self, ScaleError> {
        let (group, version) = parse_group_version(api_version)?;
        Self::in_version(client, group, version, kind)
            .await?
            .ok_or_else(|| ScaleError::NoMatch {
                kind: kind.to_owned(),
                place: format!("version {api_version:?}"),
            })
    }

    /// The resource of a kind in any version of its group, preferred ones first.
    pub(crate) async fn find_any(client: &Client, group: &str, kind: &str) -> Result<Self, ScaleError> {
        for version in versions(client, group).await? {
            if let Some(found) = Self::in_version(client, group, &version, kind).await? {
                return Ok(found);
            }
        }
        Err(ScaleError::NoMatch {
            kind: kind.to_owned(),
            place: format!("group {group:?}"),
        })
    }

    async fn in_version(
        client: &Client,
        group: &str,
        version: &str,
        kind: &str,
    ) -> Result<Option<Self>, ScaleError> {
        let list = match resources(client, group, version).await {
            Ok(list) => list,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut resources = list.resources.into_iter();
        let found = resources.find(|one| one.kind == kind && !one.name.contains('/'));
        Ok(found.map(|found| ScaleTarget {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: found.name,
        }))
    }

    /// Whether the resource has a subresource `scale` of a kind that is known.
    pub(crate) async fn has_scale(&self, client: &Client) -> Result<bool, ScaleError> {
        let name = format!("{}/scale", self.plural);
        let list = resources(client, &self.group, &self.version).await?;
        Ok(list.resources.iter().any(|one| {
            one.name == name && one.kind == "Scale" && one.group.as_deref() == Some("autoscaling")
        }))
    }

    fn scale_path(&self, namespace: &str, name: &str) -> Result<String, ScaleError> {
        if self.group.is_empty() {
            path(&[
                "api",
                &self.version,
                "namespaces",
                namespace,
                &self.plural,
                name,
                "scale",
            ])
        } else {
            let group = &self.group;
            path(&[
                "apis",
                group,
                &self.version,
                "namespaces",
                namespace,
                &self.plural,
                name,
                "scale",
            ])
        }
    }

    pub(crate) async fn get(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
    ) -> Result<Scale, ScaleError> {
        let path = self.scale_path(namespace, name)?;
        Ok(client
            .request(request(http::Method::GET, &path, Vec::new())?)
            .await?)
    }

    pub(crate) async fn update(&self, client: &Client, scale: &Scale) -> Result<Scale, ScaleError> {
        let namespace = scale.metadata.namespace.as_deref().unwrap_or_default();
        let path = self.scale_path(namespace, scale.metadata.name.as_deref().unwrap_or_default())?;
        let body = serde_json::to_vec(scale).map_err(kube::Error::SerdeError)?;
        Ok(client.request(request(http::Method::PUT, &path, body)?).await?)
    }
}

async fn versions(client: &Client, group: &str) -> Result<Vec<String>, ScaleError> {
    if group.is_empty() {
        return Ok(vec!["v1".to_owned()]);
    }
    let path = path(&["apis", group])?;
    let answer: Result<APIGroup, _> = client
        .request(request(http::Method::GET, &path, Vec::new())?)
        .await;
    let found = match answer {
        Ok(found) => found,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let preferred = found.preferred_version.map(|preferred| preferred.version);
    let mut versions: Vec<String> = found.versions.into_iter().map(|one| one.version).collect();
    versions.sort_by_key(|version| Some(version) != preferred.as_ref());
    Ok(versions)
}

async fn resources(client: &Client, group: &str, version: &str) -> Result<APIResourceList, ScaleError> {
    let path = if group.is_empty() {
        path(&["api", version])?
    } else {
        path(&["apis", group, version])?
    };
    Ok(client
        .request(request(http::Method::GET, &path, Vec::new())?)
        .await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_segment() {
        let check = |name: &str, expected: Result<&str, &str>| {
            let made = path(&["apis", name]).map_err(|error| error.to_string());
            assert_eq!(made.as_deref().map_err(String::as_str), expected);
        };
        check("apps", Ok("/apis/apps"));
        check("a b?c", Ok("/apis/a%20b%3Fc"));
        check("..", Err("invalid resource name \"..\": [may not be '..']"));
        check(
            "x/../../secrets",
            Err("invalid resource name \"x/../../secrets\": [may not contain '/']"),
        );
    }

    #[test]
    fn group_versions() {
        assert_eq!(parse_group_version("v1").unwrap(), ("", "v1"));
        assert_eq!(parse_group_version("apps/v1").unwrap(), ("apps", "v1"));
        let error = parse_group_version("a/b/c").unwrap_err().to_string();
        assert_eq!(error, "unexpected GroupVersion string: a/b/c");
    }
}
