//! A pod through the codec again and again: `protobuf_rounds WAY ROUNDS`, built with `--release` and run
//! under `time` or `perf stat`. The ways are below; those of serde_json are there to compare with.

use std::hint::black_box;

use base64::Engine as _;
use serde_json::Value;
use skiff_schema::Schema;
use skiff_schema::protobuf::{self, Header};

fn main() {
    let schema = Schema::parse(include_str!("../../api/data/types.txt")).expect("the table reads");
    let id = schema.by_gvk("", "v1", "Pod").expect("a type");
    let lines: Vec<&str> = include_str!("../../server/tests/data/registry.txt")
        .lines()
        .collect();
    let at = lines
        .iter()
        .position(|line| line.starts_with("/registry/pods/"))
        .expect("a pod");
    let stored = base64::engine::general_purpose::STANDARD
        .decode(lines[at + 1])
        .expect("base64");
    let json = lines[at + 2].as_bytes();
    let value: Value = serde_json::from_slice(json).expect("JSON");
    let header = Header {
        api_version: "v1",
        kind: "Pod",
        unversioned: true,
    };
    let words: Vec<String> = std::env::args().collect();
    let way = words.get(1).map_or("", String::as_str);
    let rounds: u32 = words.get(2).and_then(|text| text.parse().ok()).unwrap_or(1);
    let (long, short) = (json.len(), stored.len());
    println!("{way}: a pod of {long} bytes of JSON, {short} of protobuf");
    let opening = "{\"kind\":\"Pod\",\"apiVersion\":\"v1\",";
    let raw = protobuf::envelope(&stored).expect("an envelope").raw;
    for _ in 0..rounds {
        match way {
            "value-to-protobuf" => drop(black_box(protobuf::encode(&schema, id, header, &value))),
            "json-to-protobuf" => drop(black_box(protobuf::encode_json(&schema, id, header, json))),
            "protobuf-to-json" => drop(black_box(protobuf::decode_json(&schema, id, opening, raw))),
            "protobuf-to-value" => drop(black_box(protobuf::decode(&schema, id, raw))),
            "value-to-json" => drop(black_box(serde_json::to_vec(&value))),
            "json-to-value" => drop(black_box(serde_json::from_slice::<Value>(json))),
            other => panic!("no way {other:?}"),
        }
    }
}
