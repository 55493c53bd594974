//! Reads the families of `/metrics/resource` that usage is made of. The text comes from a node: nothing in it is
//! believed to be well-formed.

use crate::points::{Batch, PodName, Point};
use std::collections::{BTreeMap, HashMap};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("failed parsing metrics: line {line}: {why}")]
pub(crate) struct BadText {
    line: usize,
    why: &'static str,
}

/// One sample: `name{labels} value [timestamp]`.
struct Sample<'a> {
    name: &'a str,
    labels: Vec<(&'a str, String)>,
    value: f64,
    /// Unix nanoseconds.
    time: Option<i64>,
}

/// The readings of one node. A node or a pod of which something is missing is left out, as metrics-server does.
pub(crate) fn parse(text: &str, node: &str, now: i64) -> Result<Batch, BadText> {
    let mut of_node = Point::default();
    let mut pods: HashMap<PodName, BTreeMap<String, Point>> = HashMap::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let sample = sample(line).map_err(|why| BadText { line: at + 1, why })?;
        let time = sample.time.unwrap_or(now);
        match sample.name {
            "node_cpu_usage_seconds_total" => {
                of_node.cpu_nanos = nanos(sample.value);
                of_node.time = time;
            }
            "node_memory_working_set_bytes" => {
                of_node.memory = whole(sample.value);
                of_node.time = time;
            }
            "container_cpu_usage_seconds_total" => {
                let point = container(&mut pods, &sample);
                point.cpu_nanos = nanos(sample.value);
                point.time = time;
            }
            "container_memory_working_set_bytes" => {
                let point = container(&mut pods, &sample);
                point.memory = whole(sample.value);
                point.time = time;
            }
            "container_start_time_seconds" => {
                let started = i64::try_from(nanos(sample.value)).unwrap_or(i64::MAX);
                container(&mut pods, &sample).started = started;
            }
            _ => {}
        }
    }
    let complete = |point: &Point| point.time != 0 && point.cpu_nanos != 0 && point.memory != 0;
    pods.retain(|_, containers| containers.values().all(complete));
    let mut nodes = HashMap::new();
    if complete(&of_node) {
        nodes.insert(node.to_owned(), of_node);
    }
    Ok(Batch { nodes, pods })
}

fn container<'a>(
    pods: &'a mut HashMap<PodName, BTreeMap<String, Point>>,
    sample: &Sample<'_>,
) -> &'a mut Point {
    let label = |name: &str| {
        let found = sample.labels.iter().find(|(label, _)| *label == name);
        found.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    pods.entry((label("namespace"), label("pod")))
        .or_default()
        .entry(label("container"))
        .or_default()
}

/// Casts of floats saturate, and what is no number is 0.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(value: f64) -> u64 {
    value as u64
}

fn nanos(seconds: f64) -> u64 {
    whole(seconds * 1e9)
}

fn sample(line: &str) -> Result<Sample<'_>, &'static str> {
    let end = line.find(['{', ' ', '\t']).ok_or("no value")?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let mut words = rest.split_ascii_whitespace();
    let value = words.next().and_then(|word| word.parse::<f64>().ok());
    let time = match words.next() {
        Some(word) => {
            let millis = word.parse::<i64>().map_err(|_| "bad timestamp")?;
            Some(millis.saturating_mul(1_000_000))
        }
        None => None,
    };
    Ok(Sample {
        name,
        labels,
        value: value.ok_or("bad value")?,
        time,
    })
}

type Labels<'a> = Vec<(&'a str, String)>;

/// The labels up to the closing brace, and what follows it.
fn labels(mut rest: &str) -> Result<(Labels<'_>, &str), &'static str> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Ok((labels, rest));
        }
        let (name, after) = rest.split_once("=\"").ok_or("bad labels")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        loop {
            let (at, character) = characters.next().ok_or("a label without an end")?;
            match character {
                '"' => {
                    rest = &after[at + 1..];
                    break;
                }
                '\\' => match characters.next().ok_or("a label without an end")?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                other => value.push(other),
            }
        }
        labels.push((name.trim(), value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page() {
        let text = "# HELP node_cpu_usage_seconds_total words\n# TYPE node_cpu_usage_seconds_total counter\n\
            node_cpu_usage_seconds_total 1.5 1000\n\
            node_memory_working_set_bytes 1.048576e+06 1001\n\
            container_cpu_usage_seconds_total{container=\"c\",namespace=\"ns\",pod=\"p\"} 2 2000\n\
            container_memory_working_set_bytes{container=\"c\",namespace=\"ns\",pod=\"p\"} 4096\n\
            container_start_time_seconds{container=\"c\",namespace=\"ns\",pod=\"p\"} 0.5\n\
            container_cpu_usage_seconds_total{container=\"x\",namespace=\"ns\",pod=\"half\"} 2 2000\n\
            something_else{a=\"\\\"}{\\\\\",} 1\n\
            resource_scrape_error 0\n";
        let batch = parse(text, "n", 3_000_000_000).unwrap();
        let node = Point {
            started: 0,
            time: 1_001_000_000,
            cpu_nanos: 1_500_000_000,
            memory: 1 << 20,
        };
        assert_eq!(batch.nodes, HashMap::from([("n".to_owned(), node)]));
        let container = Point {
            started: 500_000_000,
            time: 3_000_000_000,
            cpu_nanos: 2_000_000_000,
            memory: 4096,
        };
        let containers = BTreeMap::from([("c".to_owned(), container)]);
        let pods = HashMap::from([(("ns".to_owned(), "p".to_owned()), containers)]);
        assert_eq!(batch.pods, pods, "a pod without memory is left out");
    }

    #[test]
    fn no_text_of_a_node_does_harm() {
        let check = |line: &str, expected: &'static str| {
            let found = parse(&format!("ok 1\n{line}\n"), "n", 0);
            let expected = BadText {
                line: 2,
                why: expected,
            };
            assert_eq!(found, Err(expected), "{line}");
        };
        check("name", "no value");
        check("name x", "bad value");
        check("name{a=\"b} 1", "a label without an end");
        check("name{a=\"b\\", "a label without an end");
        check("name{a} 1", "bad labels");
        check("name{", "bad labels");
        check("name 1 soon", "bad timestamp");
        for value in ["NaN", "-1", "+Inf", "1e400"] {
            let text =
                format!("node_cpu_usage_seconds_total {value}\ncontainer_start_time_seconds{{}} {value}\n");
            assert!(parse(&text, "n", 1).unwrap().nodes.is_empty(), "no memory");
        }
        assert_eq!(parse("", "n", 1), Ok(Batch::default()));
    }
}
