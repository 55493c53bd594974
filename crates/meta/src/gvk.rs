//! Names of kinds and resources, with the spellings that appear in messages and URLs.

use std::fmt;

/// A group and version, as in `apiVersion`: `v1`, `apps/v1`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct GroupVersion {
    pub group: String,
    pub version: String,
}

impl GroupVersion {
    pub fn new(group: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            group: group.into(),
            version: version.into(),
        }
    }

    /// Parses `apiVersion`. More than one slash is refused, as upstream does.
    pub fn parse(api_version: &str) -> Result<Self, String> {
        match api_version.split('/').collect::<Vec<_>>()[..] {
            [version] => Ok(Self::new("", version)),
            [group, version] => Ok(Self::new(group, version)),
            _ => Err(format!("unexpected GroupVersion string: {api_version}")),
        }
    }
}

impl fmt::Display for GroupVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.group.is_empty() {
            f.write_str(&self.version)
        } else {
            write!(f, "{}/{}", self.group, self.version)
        }
    }
}

/// A group, version and kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct GroupVersionKind {
    pub group: String,
    pub version: String,
    pub kind: String,
}

impl GroupVersionKind {
    pub fn new(group: impl Into<String>, version: impl Into<String>, kind: impl Into<String>) -> Self {
        Self {
            group: group.into(),
            version: version.into(),
            kind: kind.into(),
        }
    }

    pub fn group_version(&self) -> GroupVersion {
        GroupVersion::new(&self.group, &self.version)
    }

    pub fn group_kind(&self) -> GroupKind {
        GroupKind::new(&self.group, &self.kind)
    }

    pub fn api_version(&self) -> String {
        self.group_version().to_string()
    }
}

impl fmt::Display for GroupVersionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}, Kind={}", self.group, self.version, self.kind)
    }
}

/// A group, version and plural resource name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct GroupVersionResource {
    pub group: String,
    pub version: String,
    pub resource: String,
}

impl GroupVersionResource {
    pub fn new(group: impl Into<String>, version: impl Into<String>, resource: impl Into<String>) -> Self {
        Self {
            group: group.into(),
            version: version.into(),
            resource: resource.into(),
        }
    }

    pub fn group_resource(&self) -> GroupResource {
        GroupResource::new(&self.group, &self.resource)
    }

    pub fn group_version(&self) -> GroupVersion {
        GroupVersion::new(&self.group, &self.version)
    }
}

impl fmt::Display for GroupVersionResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}, Resource={}", self.group, self.version, self.resource)
    }
}

macro_rules! dotted_pair {
    ($(#[$doc:meta])* $name:ident, $field:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name {
            pub group: String,
            pub $field: String,
        }

        impl $name {
            pub fn new(group: impl Into<String>, $field: impl Into<String>) -> Self {
                Self { group: group.into(), $field: $field.into() }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                if self.group.is_empty() { f.write_str(&self.$field) } else { write!(f, "{}.{}", self.$field, self.group) }
            }
        }
    };
}

dotted_pair!(
    /// A kind in its group, printed `Deployment.apps`.
    GroupKind,
    kind
);
dotted_pair!(
    /// A resource in its group, printed `deployments.apps`.
    GroupResource,
    resource
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_versions_parse_and_print() {
        for (text, group, version) in [("v1", "", "v1"), ("apps/v1", "apps", "v1")] {
            let parsed = GroupVersion::parse(text).unwrap();
            assert_eq!((parsed.group.as_str(), parsed.version.as_str()), (group, version));
            assert_eq!(parsed.to_string(), text);
        }
        assert!(GroupVersion::parse("a/b/c").is_err());
        assert_eq!(
            GroupResource::new("apps", "deployments").to_string(),
            "deployments.apps"
        );
        assert_eq!(GroupKind::new("", "Pod").to_string(), "Pod");
    }
}
