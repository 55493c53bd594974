//! Decoders and patches meet broken input: whatever it is, they answer and do not panic. The mutations are
//! the same in every run.

use serde_json::Value;
use skiff_schema::decode::{Document, Format};
use skiff_schema::patch::{PatchType, decode_patch, json_patch, merge_patch, strategic_merge};
use skiff_schema::{Schema, normalise};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    /// Some bytes changed, cut, doubled, or swapped for tokens that mean something.
    fn mutate(&mut self, body: &[u8]) -> Vec<u8> {
        const TOKENS: &[&str] = &[
            "null",
            "{",
            "}",
            "[",
            "]",
            "\"",
            "\\u",
            "\\ud800",
            "1e999",
            "-",
            "0x",
            ":",
            ",",
            "&a",
            "*a",
            "<<: *a",
            "!!binary",
            "---",
            "\u{0}",
            "\u{feff}",
            "$patch",
            "~1",
            "- - - -",
            "?",
            "|\n",
            "99999999999999999999",
        ];
        let mut out = body.to_vec();
        for _ in 0..1 + self.below(4) {
            let at = self.below(out.len() + 1);
            match self.below(4) {
                0 if at < out.len() => out[at] = self.below(256) as u8,
                1 => out.truncate(at),
                2 => {
                    let end = (at + self.below(20)).min(out.len());
                    let piece = out[at..end].to_vec();
                    out.splice(at..at, piece);
                }
                _ => {
                    let token = TOKENS[self.below(TOKENS.len())];
                    out.splice(at..at, token.bytes());
                }
            }
            if out.is_empty() {
                break;
            }
        }
        out
    }
}

const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","labels":{"a":"1"},"finalizers":["x","y"],
"creationTimestamp":"2024-01-01T00:00:00Z"},"spec":{"containers":[{"name":"a","image":"i","env":[{"name":"E"}],
"resources":{"limits":{"cpu":"100m","memory":"1Gi"}},"ports":[{"containerPort":80}],
"readinessProbe":{"httpGet":{"port":"http"},"periodSeconds":5}}],"volumes":[{"name":"v","emptyDir":{}}]}}"#;

const YAML: &str = "kind: Pod\napiVersion: v1\nmetadata: &a\n  name: p\n  labels: {a: '1', b: yes}\nspec:\n  containers:\n  - name: a\n    args: [\"x\", |\n      y\n      ]\n  other: *a\n";

const STRATEGIC: &str = r#"{"metadata":{"$deleteFromPrimitiveList/finalizers":["x"],"$setElementOrder/finalizers":["y"]},
"spec":{"$setElementOrder/containers":[{"name":"b"},{"name":"a"}],"containers":[{"name":"b","$patch":"delete"},
{"name":"a","env":[{"name":"E","$retainKeys":["name"]}]}],"volumes":[{"$patch":"replace"},{"name":"w"}]}}"#;

const OPERATIONS: &str = r#"[{"op":"add","path":"/spec/containers/-","value":{"name":"c"}},{"op":"test","path":"/kind",
"value":"Pod"},{"op":"copy","from":"/spec","path":"/spec2"},{"op":"move","from":"/metadata/labels/a","path":"/x~1y"},
{"op":"remove","path":"/spec/containers/0"},{"op":"replace","path":"/metadata/name","value":null}]"#;

#[test]
fn broken_bodies_are_answered() {
    let schema = Schema::parse(include_str!("../../api/data/types.txt")).expect("the table reads");
    let pod = schema.by_gvk("", "v1", "Pod").expect("known");
    let mut random = Random(0x5eed);
    for _ in 0..4000 {
        for (body, format) in [(POD, Format::Json), (YAML, Format::Yaml)] {
            let body = random.mutate(body.as_bytes());
            if let Ok(document) = Document::parse(&body, format)
                && let Ok(checked) = document.check(&schema, pod)
            {
                let mut value = checked.value;
                normalise(&schema, pod, &mut value);
                let once = value.clone();
                normalise(&schema, pod, &mut value);
                assert_eq!(value, once, "normalising twice changes nothing");
            }
        }
    }
}

#[test]
fn broken_patches_are_answered() {
    let schema = Schema::parse(include_str!("../../api/data/types.txt")).expect("the table reads");
    let pod = schema.by_gvk("", "v1", "Pod").expect("known");
    let current: Value = serde_json::from_str(POD).expect("json");
    let mut random = Random(0xcafe);
    let mut applied = 0;
    for _ in 0..4000 {
        for (body, patch_type) in [
            (OPERATIONS, PatchType::Json),
            (STRATEGIC, PatchType::Merge),
            (STRATEGIC, PatchType::StrategicMerge),
        ] {
            let body = random.mutate(body.as_bytes());
            let Ok(patch) = decode_patch(patch_type, &body, true) else {
                continue;
            };
            let outcome = match patch_type {
                PatchType::Json => json_patch(&current, &patch.value),
                PatchType::Merge => merge_patch(&current, &patch.value),
                PatchType::StrategicMerge => strategic_merge(&schema, pod, &current, &patch.value),
            };
            applied += usize::from(outcome.is_ok());
        }
    }
    assert!(applied > 100, "only {applied} mutations were still patches");
}
