//! The part of an image's configuration that a container is started with.

use super::platform::DescribedPlatform;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// Names of the OCI image specification, kept as they are on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    #[serde(deserialize_with = "or_default")]
    pub user: String,
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub cmd: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub working_dir: String,
    #[serde(deserialize_with = "or_default")]
    pub stop_signal: String,
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default")]
    pub volumes: BTreeMap<String, serde_json::Value>,
}

/// Older tools write `null` for what is empty.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// The configuration file around it.
#[derive(Debug, Deserialize)]
pub struct ConfigFile {
    #[serde(default, deserialize_with = "or_default")]
    pub config: ImageConfig,
    pub rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub struct RootFs {
    #[serde(default)]
    pub diff_ids: Vec<String>,
}

/// A manifest or an index; which it is shows by its fields.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub config: Option<Descriptor>,
    #[serde(default)]
    pub layers: Vec<Descriptor>,
    #[serde(default)]
    pub manifests: Vec<Descriptor>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub digest: String,
    #[serde(default)]
    pub size: u64,
    pub platform: Option<DescribedPlatform>,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nulls() {
        let file: ConfigFile = serde_json::from_str(
            r#"{"architecture":"amd64","os":"linux","config":{"Env":null,"Cmd":["sh"],"Volumes":{"/data":{}}},
                "rootfs":{"type":"layers","diff_ids":["sha256:1"]}}"#,
        )
        .expect("parses");
        assert_eq!(file.config.cmd, ["sh"]);
        assert!(file.config.env.is_empty());
        assert!(file.config.volumes.contains_key("/data"));
    }
}
