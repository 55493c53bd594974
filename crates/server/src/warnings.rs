//! The Warning headers of an answer, which together stay so small that every client reads them.

use http::{HeaderMap, HeaderValue};

/// What the warnings of an answer may have together, in characters.
const TOTAL_MAX: usize = 4 * 1024;
/// What is left of one where they would have more.
const ONE_MAX: usize = 256;

/// Adds the headers.
pub fn write(warnings: Vec<String>, headers: &mut HeaderMap) {
    for warning in bounded(warnings) {
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{}\"", quoted(&warning))) {
            headers.append("warning", value);
        }
    }
}

/// COMPAT: once there are too many, those so far are cut and all sent, and others as long as there is room.
fn bounded(mut warnings: Vec<String>) -> Vec<String> {
    let length = |text: &String| text.chars().count();
    let mut written = 0;
    let over = warnings.iter().position(|warning| {
        written += length(warning);
        written > TOTAL_MAX
    });
    let Some(over) = over else {
        return warnings;
    };
    let mut written = 0;
    let mut kept = 0;
    for (index, warning) in warnings.iter_mut().enumerate() {
        if index > over && written >= TOTAL_MAX {
            break;
        }
        if let Some((end, _)) = warning.char_indices().nth(ONE_MAX) {
            warning.truncate(end);
        }
        written += length(warning);
        kept = index + 1;
    }
    warnings.truncate(kept);
    warnings
}

/// Text inside the quotes of a Warning header.
fn quoted(text: &str) -> String {
    text.chars()
        .filter(|char| !char.is_control())
        .flat_map(|char| match char {
            '"' | '\\' => vec!['\\', char],
            char => vec![char],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_are_cut() {
        let check = |lengths: &[usize], expected: &[usize]| {
            let warnings = lengths.iter().map(|length| "\u{e9}".repeat(*length)).collect();
            let found: Vec<usize> = bounded(warnings).iter().map(|w| w.chars().count()).collect();
            assert_eq!(found, expected, "{lengths:?}");
        };
        check(&[4096], &[4096]);
        check(&[4000, 96], &[4000, 96]);
        check(&[4000, 97, 5], &[256, 97, 5]);
        check(&[4097; 20], &[256; 16]);
        check(
            &[1000, 1000, 1000, 1000, 1000, 10],
            &[256, 256, 256, 256, 256, 10],
        );
        check(&[115; 190], &[115; 36]);
    }
}
