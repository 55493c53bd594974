//! Files of one volume that get in each other's way: two at one path, or one where another needs a folder.

use std::collections::BTreeMap;
use std::ops::Bound;

use serde_json::Value;
use skiff_meta::field::quote;

use crate::node::{at, is_empty, list, text};

/// A path, and what puts a file there where a volume has several sources.
struct File {
    path: String,
    source: String,
}

impl File {
    fn new(path: &str, source: &str) -> File {
        File {
            path: path.trim_end_matches('/').to_owned(),
            source: source.to_owned(),
        }
    }

    fn shown(&self) -> String {
        match &*self.source {
            "" => quote(&self.path),
            source => format!("{} ({source})", quote(&self.path)),
        }
    }
}

/// More than fit into an answer by far.
const MOST: usize = 1000;

/// The pairs of files that collide: one at the path of the other, or in a folder of that name. The later one comes first.
fn collisions(files: &[File]) -> Vec<(&File, &File)> {
    let mut found = Vec::new();
    let mut earlier: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (position, file) in files.iter().enumerate().filter(|(_, file)| !file.path.is_empty()) {
        let own = format!("{}/", file.path);
        let above = own
            .match_indices('/')
            .filter_map(|(at, _)| earlier.get(&own[..=at]));
        let below = earlier
            .range::<String, _>((Bound::Excluded(&own), Bound::Unbounded))
            .take_while(|(path, _)| path.starts_with(&own))
            .map(|(_, places)| places);
        let mut places: Vec<usize> = above.chain(below).flatten().copied().take(MOST).collect();
        places.sort_unstable();
        found.extend(places.into_iter().map(|place| (file, &files[place])));
        if found.len() >= MOST {
            break;
        }
        earlier.entry(own).or_default().push(position);
    }
    found
}

/// The warnings of the volumes of a pod.
pub fn overlaps(volumes: &[Value], warnings: &mut Vec<String>) {
    for volume in volumes {
        let name = quote(text(volume, "name"));
        let mut report = |what: &str, files: Vec<File>| {
            for (file, other) in collisions(&files) {
                warnings.push(format!(
                    "volume {name} ({what}): overlapping paths: {} with {}",
                    file.shown(),
                    other.shown()
                ));
            }
        };
        let config_map = format!("ConfigMap {}", quote(text(volume, "configMap.name")));
        report(&config_map, items(at(volume, "configMap"), ""));
        let secret = format!("Secret {}", quote(text(volume, "secret.secretName")));
        report(&secret, items(at(volume, "secret"), ""));
        report("DownwardAPI", items(at(volume, "downwardAPI"), ""));
        let sources = list(volume, "projected.sources");
        let empty = sources
            .iter()
            .filter(|source| {
                source
                    .as_object()
                    .is_none_or(|map| map.values().all(Value::is_null))
            })
            .count();
        report("Projected", sources.iter().flat_map(projected).collect());
        for _ in 0..empty {
            warnings.push(format!("volume {name} (Projected) has no sources provided"));
        }
    }
}

fn items(source: &Value, says: &str) -> Vec<File> {
    list(source, "items")
        .iter()
        .map(|item| File::new(text(item, "path"), says))
        .collect()
}

fn projected(source: &Value) -> Vec<File> {
    let named = |what: &str, at: &Value| format!("{what} {}", quote(text(at, "name")));
    for (field, what) in [("configMap", "ConfigMap"), ("secret", "Secret")] {
        let from = at(source, field);
        if !is_empty(at(from, "items")) {
            return items(from, &named(what, from));
        }
    }
    let downward = at(source, "downwardAPI");
    if !is_empty(at(downward, "items")) {
        return items(downward, "DownwardAPI");
    }
    let token = at(source, "serviceAccountToken");
    if !token.is_null() {
        return vec![File::new(text(token, "path"), "ServiceAccountToken")];
    }
    let bundle = at(source, "clusterTrustBundle");
    if !bundle.is_null() {
        let by = if at(bundle, "name").is_null() {
            "signerName"
        } else {
            "name"
        };
        let says = format!("ClusterTrustBundle {}", quote(text(bundle, by)));
        return vec![File::new(text(bundle, "path"), &says)];
    }
    [
        ("certificateChainPath", "PodCertificate chain"),
        ("keyPath", "PodCertificate key"),
        ("credentialBundlePath", "PodCertificate credential bundle"),
    ]
    .into_iter()
    .map(|(field, says)| File::new(text(at(source, "podCertificate"), field), says))
    .filter(|file| !file.path.is_empty())
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn files_that_collide() {
        let check = |volume: Value, expected: &[&str]| {
            let mut warnings = Vec::new();
            overlaps(&[volume], &mut warnings);
            assert_eq!(warnings, expected);
        };
        check(
            json!({"name": "v", "configMap": {"name": "c", "items": [{"path": "a"}, {"path": "a/b"}, {"path": "ab"}]}}),
            &["volume \"v\" (ConfigMap \"c\"): overlapping paths: \"a/b\" with \"a\""],
        );
        check(
            json!({"name": "v", "projected": {"sources": [
                {"secret": {"name": "s", "items": [{"path": "t"}]}}, {"serviceAccountToken": {"path": "t"}}, {}]}}),
            &[
                "volume \"v\" (Projected): overlapping paths: \"t\" (ServiceAccountToken) with \"t\" (Secret \"s\")",
                "volume \"v\" (Projected) has no sources provided",
            ],
        );
        check(
            json!({"name": "v", "projected": {"sources": [
                {"podCertificate": {"keyPath": "k", "certificateChainPath": "c"}},
                {"podCertificate": {"credentialBundlePath": "k"}}]}}),
            &[
                "volume \"v\" (Projected): overlapping paths: \"k\" (PodCertificate credential bundle) with \"k\" (PodCertificate key)",
            ],
        );
        check(json!({"name": "v", "emptyDir": {}}), &[]);
        let says =
            |a: &str, b: &str| format!("volume \"v\" (DownwardAPI): overlapping paths: \"{a}\" with \"{b}\"");
        let mut warnings = Vec::new();
        let items = json!([{"path": "b/c/d"}, {"path": "a"}, {"path": "b/c"}, {"path": "b//c"}, {"path": "b/c-d"},
            {"path": ""}, {"path": "b/"}, {"path": "a"}]);
        overlaps(
            &[json!({"name": "v", "downwardAPI": {"items": items}})],
            &mut warnings,
        );
        assert_eq!(
            warnings,
            [
                says("b/c", "b/c/d"),
                says("b", "b/c/d"),
                says("b", "b/c"),
                says("b", "b//c"),
                says("b", "b/c-d"),
                says("a", "a"),
            ]
        );
    }

    #[test]
    fn thousands_of_files() {
        let files = |path: fn(usize) -> String| -> Vec<File> {
            (0..50_000).map(|n| File::new(&path(n), "")).collect()
        };
        assert!(collisions(&files(|n| format!("f{n}"))).is_empty());
        assert!(collisions(&files(|_| "same".to_owned())).len() >= MOST);
    }
}
