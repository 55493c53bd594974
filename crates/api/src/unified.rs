//! Unified differences of two texts, line by line, with three lines around each change: the longest run of equal
//! lines first, then what is left of it and right of it. Lines that are everywhere in a long text do not start a run.

use std::collections::HashMap;

const CONTEXT: usize = 3;
/// Pairs of equal lines that are looked at before the rest counts as changed: texts made to be hard end here.
const BUDGET: usize = 1_000_000;

#[derive(Clone, Copy, PartialEq)]
enum Tag {
    Equal,
    Replace,
}

#[derive(Clone, Copy)]
struct Code {
    tag: Tag,
    a: (usize, usize),
    b: (usize, usize),
}

pub fn diff(a: &str, b: &str) -> String {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('\n').collect(), b.split('\n').collect());
    let mut out = String::new();
    for group in groups(codes(&a, &b)) {
        let (Some(first), Some(last)) = (group.first(), group.last()) else {
            continue;
        };
        let (from, to) = (range(first.a.0, last.a.1), range(first.b.0, last.b.1));
        out.push_str(&format!("@@ -{from} +{to} @@\n"));
        let mut lines = |mark: char, lines: &[&str]| {
            for line in lines {
                out.push(mark);
                out.push_str(line);
                out.push('\n');
            }
        };
        for code in &group {
            if code.tag == Tag::Equal {
                lines(' ', &a[code.a.0..code.a.1]);
            } else {
                lines('-', &a[code.a.0..code.a.1]);
                lines('+', &b[code.b.0..code.b.1]);
            }
        }
    }
    out
}

fn range(start: usize, stop: usize) -> String {
    match stop - start {
        1 => (start + 1).to_string(),
        0 => format!("{start},0"),
        length => format!("{},{length}", start + 1),
    }
}

/// Runs of equal lines as (start in a, start in b, length), in order.
fn matches(a: &[&str], b: &[&str]) -> Vec<(usize, usize, usize)> {
    let mut places: HashMap<&str, Vec<usize>> = HashMap::new();
    for (j, line) in b.iter().enumerate() {
        places.entry(line).or_default().push(j);
    }
    if b.len() >= 200 {
        let most = b.len() / 100 + 1;
        places.retain(|_, found| found.len() <= most);
    }
    let mut budget = BUDGET;
    let mut found = Vec::new();
    let mut waiting = vec![(0, a.len(), 0, b.len())];
    while let Some((a_low, a_high, b_low, b_high)) = waiting.pop() {
        let run = longest(a, b, &places, (a_low, a_high), (b_low, b_high), &mut budget);
        let (i, j, length) = run;
        if length == 0 {
            continue;
        }
        found.push(run);
        if a_low < i && b_low < j {
            waiting.push((a_low, i, b_low, j));
        }
        if i + length < a_high && j + length < b_high {
            waiting.push((i + length, a_high, j + length, b_high));
        }
    }
    found.sort_unstable();
    found
}

fn longest(
    a: &[&str],
    b: &[&str],
    places: &HashMap<&str, Vec<usize>>,
    (a_low, a_high): (usize, usize),
    (b_low, b_high): (usize, usize),
    budget: &mut usize,
) -> (usize, usize, usize) {
    let (mut best_i, mut best_j, mut best) = (a_low, b_low, 0);
    // How long the run is that ends at (i - 1, j), for each j.
    let mut lengths: HashMap<usize, usize> = HashMap::new();
    for (i, line) in a.iter().enumerate().take(a_high).skip(a_low) {
        let mut next = HashMap::new();
        for &j in places.get(line).into_iter().flatten() {
            if j < b_low {
                continue;
            }
            if j >= b_high || *budget == 0 {
                break;
            }
            *budget -= 1;
            let length = j
                .checked_sub(1)
                .and_then(|j| lengths.get(&j))
                .copied()
                .unwrap_or(0)
                + 1;
            next.insert(j, length);
            if length > best {
                (best_i, best_j, best) = (i + 1 - length, j + 1 - length, length);
            }
        }
        lengths = next;
    }
    while best_i > a_low && best_j > b_low && a[best_i - 1] == b[best_j - 1] {
        (best_i, best_j, best) = (best_i - 1, best_j - 1, best + 1);
    }
    while best_i + best < a_high && best_j + best < b_high && a[best_i + best] == b[best_j + best] {
        best += 1;
    }
    (best_i, best_j, best)
}

/// What is equal and what is not, from start to end.
fn codes(a: &[&str], b: &[&str]) -> Vec<Code> {
    let mut codes: Vec<Code> = Vec::new();
    let (mut i, mut j) = (0, 0);
    for (next_i, next_j, length) in matches(a, b).into_iter().chain([(a.len(), b.len(), 0)]) {
        if i < next_i || j < next_j {
            codes.push(Code {
                tag: Tag::Replace,
                a: (i, next_i),
                b: (j, next_j),
            });
        }
        (i, j) = (next_i + length, next_j + length);
        if length == 0 {
            continue;
        }
        let equal = Code {
            tag: Tag::Equal,
            a: (next_i, i),
            b: (next_j, j),
        };
        match codes.last_mut() {
            Some(last) if last.tag == Tag::Equal => (last.a.1, last.b.1) = (i, j),
            _ => codes.push(equal),
        }
    }
    codes
}

/// Cuts the equal parts down to the lines around the changes.
fn groups(mut codes: Vec<Code>) -> Vec<Vec<Code>> {
    if let Some(first) = codes.first_mut().filter(|c| c.tag == Tag::Equal) {
        first.a.0 = first.a.0.max(first.a.1.saturating_sub(CONTEXT));
        first.b.0 = first.b.0.max(first.b.1.saturating_sub(CONTEXT));
    }
    if let Some(last) = codes.last_mut().filter(|c| c.tag == Tag::Equal) {
        last.a.1 = last.a.1.min(last.a.0 + CONTEXT);
        last.b.1 = last.b.1.min(last.b.0 + CONTEXT);
    }
    let mut groups = Vec::new();
    let mut group: Vec<Code> = Vec::new();
    for mut code in codes {
        if code.tag == Tag::Equal && code.a.1 - code.a.0 > 2 * CONTEXT {
            let end = Code {
                a: (code.a.0, code.a.0 + CONTEXT),
                b: (code.b.0, code.b.0 + CONTEXT),
                ..code
            };
            group.push(end);
            groups.push(std::mem::take(&mut group));
            code.a.0 = code.a.1 - CONTEXT;
            code.b.0 = code.b.1 - CONTEXT;
        }
        group.push(code);
    }
    groups.push(group);
    groups.retain(|group| group.iter().any(|code| code.tag != Tag::Equal));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_shown_with_their_lines() {
        let check = |a: &str, b: &str, expected: &str| assert_eq!(diff(a, b), expected, "{a:?} {b:?}");
        check("a\nb", "a\nb", "");
        check("a", "b", "@@ -1 +1 @@\n-a\n+b\n");
        check("a\nb\nc", "a\nc", "@@ -1,3 +1,2 @@\n a\n-b\n c\n");
        check(
            "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12",
            "x\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\ny",
            "@@ -1,4 +1,4 @@\n-1\n+x\n 2\n 3\n 4\n@@ -9,4 +9,4 @@\n 9\n 10\n 11\n-12\n+y\n",
        );
    }

    #[test]
    fn texts_that_are_hard_to_compare_end() {
        let many: String = (0..8_000).map(|i| format!("{}\n", i % 200)).collect();
        let other: String = (0..8_000).map(|i| format!("{}\n", (i * 7) % 200)).collect();
        assert!(diff(&many, &other).starts_with("@@ "));
    }
}
