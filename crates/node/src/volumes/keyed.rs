//! `configMap` and `secret` volumes: which key becomes which file. Pure.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, KeyToPath, Secret};

use super::atomic_writer::{File, Payload};

/// The files of a ConfigMap, or of nothing if it is optional and missing.
pub fn config_map_payload(
    map: Option<&ConfigMap>,
    items: Option<&Vec<KeyToPath>>,
    default_mode: i32,
    optional: bool,
) -> Result<Payload, String> {
    let mut data: BTreeMap<&str, &[u8]> = BTreeMap::new();
    if let Some(map) = map {
        data.extend(map.data.iter().flatten().map(|(k, v)| (k.as_str(), v.as_bytes())));
        data.extend(
            map.binary_data
                .iter()
                .flatten()
                .map(|(k, v)| (k.as_str(), v.0.as_slice())),
        );
    }
    payload(
        &data,
        items,
        default_mode,
        optional,
        "configmap references non-existent config key",
    )
}

pub fn secret_payload(
    secret: Option<&Secret>,
    items: Option<&Vec<KeyToPath>>,
    default_mode: i32,
    optional: bool,
) -> Result<Payload, String> {
    let data: BTreeMap<&str, &[u8]> = secret
        .into_iter()
        .flat_map(|s| s.data.iter().flatten())
        .map(|(k, ByteString(v))| (k.as_str(), v.as_slice()))
        .collect();
    payload(
        &data,
        items,
        default_mode,
        optional,
        "references non-existent secret key",
    )
}

fn payload(
    data: &BTreeMap<&str, &[u8]>,
    items: Option<&Vec<KeyToPath>>,
    default_mode: i32,
    optional: bool,
    missing: &str,
) -> Result<Payload, String> {
    let file = |bytes: &[u8], mode: Option<i32>| File {
        data: bytes.to_vec(),
        mode: u32::try_from(mode.unwrap_or(default_mode)).unwrap_or(0o644) & 0o7777,
        owner: None,
    };
    let items = items.map(Vec::as_slice).unwrap_or_default();
    if items.is_empty() {
        return Ok(data
            .iter()
            .map(|(key, bytes)| ((*key).to_owned(), file(bytes, None)))
            .collect());
    }
    let mut payload = Payload::new();
    for item in items {
        match data.get(item.key.as_str()) {
            Some(bytes) => {
                payload.insert(item.path.clone(), file(bytes, item.mode));
            }
            None if optional => {}
            None => return Err(format!("{missing}: {}", item.key)),
        }
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Path, content, mode.
    type Expected<'a> = (&'a str, &'a [u8], u32);

    #[test]
    fn keys_to_files() {
        let map: ConfigMap =
            serde_json::from_value(json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": "AAE="}}))
                .unwrap();
        let check = |items: serde_json::Value, optional: bool, expected: Result<&[Expected<'_>], &str>| {
            let items: Vec<KeyToPath> = serde_json::from_value(items).unwrap();
            let made = config_map_payload(Some(&map), Some(&items), 0o644, optional);
            let expected = expected
                .map(|files| {
                    files
                        .iter()
                        .map(|(p, d, m)| {
                            (
                                (*p).to_owned(),
                                File {
                                    data: d.to_vec(),
                                    mode: *m,
                                    owner: None,
                                },
                            )
                        })
                        .collect::<Payload>()
                })
                .map_err(str::to_owned);
            assert_eq!(made, expected);
        };
        check(
            json!([]),
            false,
            Ok(&[("a", b"1", 0o644), ("b", b"2", 0o644), ("c", &[0, 1], 0o644)]),
        );
        check(
            json!([{"key": "a", "path": "x/y", "mode": 256}]),
            false,
            Ok(&[("x/y", b"1", 0o400)]),
        );
        check(
            json!([{"key": "no", "path": "x"}]),
            false,
            Err("configmap references non-existent config key: no"),
        );
        check(json!([{"key": "no", "path": "x"}]), true, Ok(&[]));
        assert_eq!(config_map_payload(None, None, 0o644, true), Ok(Payload::new()));
    }
}
