//! Reads a cron schedule of five fields, only to say what is wrong with it.

const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

struct Bounds {
    min: u32,
    max: u32,
    names: &'static [&'static str],
}

const FIELDS: [Bounds; 5] = [
    Bounds {
        min: 0,
        max: 59,
        names: &[],
    },
    Bounds {
        min: 0,
        max: 23,
        names: &[],
    },
    Bounds {
        min: 1,
        max: 31,
        names: &[],
    },
    Bounds {
        min: 1,
        max: 12,
        names: &MONTHS,
    },
    Bounds {
        min: 0,
        max: 6,
        names: &DAYS,
    },
];

/// `Ok` for a schedule that can be followed, else upstream's complaint.
pub fn check(schedule: &str) -> Result<(), String> {
    if schedule.is_empty() {
        return Err("empty spec string".to_owned());
    }
    let mut spec = schedule;
    if let Some(rest) = spec.strip_prefix("TZ=").or_else(|| spec.strip_prefix("CRON_TZ=")) {
        spec = rest.split_once(' ').map_or("", |(_, s)| s.trim());
    }
    if let Some(descriptor) = spec.strip_prefix('@') {
        return match descriptor {
            "yearly" | "annually" | "monthly" | "weekly" | "daily" | "midnight" | "hourly" => Ok(()),
            _ if descriptor.starts_with("every ") => Ok(()),
            _ => Err(format!("unrecognized descriptor: @{descriptor}")),
        };
    }
    let fields: Vec<&str> = spec.split_whitespace().collect();
    if fields.len() != FIELDS.len() {
        return Err(format!(
            "expected exactly 5 fields, found {}: [{}]",
            fields.len(),
            fields.join(" ")
        ));
    }
    fields
        .iter()
        .zip(&FIELDS)
        .try_for_each(|(field, bounds)| field.split(',').try_for_each(|r| range(r, bounds)))
}

fn number(text: &str, bounds: &Bounds) -> Result<u32, String> {
    if let Some(i) = bounds.names.iter().position(|n| n.eq_ignore_ascii_case(text)) {
        return Ok(i as u32 + bounds.min);
    }
    match text.parse::<i64>() {
        Ok(n) if n < 0 => Err(format!("negative number ({n}) not allowed: {text}")),
        Ok(n) => Ok(n as u32),
        Err(_) => Err(format!(
            "failed to parse int from {text}: strconv.Atoi: parsing {text:?}: invalid syntax"
        )),
    }
}

fn range(expression: &str, bounds: &Bounds) -> Result<(), String> {
    let (span, step) = match expression.split('/').collect::<Vec<_>>()[..] {
        [span] => (span, None),
        [span, step] => (span, Some(step)),
        _ => return Err(format!("too many slashes: {expression}")),
    };
    let (start, mut end) = match span.split('-').collect::<Vec<_>>()[..] {
        ["*" | "?"] => (bounds.min, bounds.max),
        [one] => {
            let n = number(one, bounds)?;
            (n, n)
        }
        [from, to] => (number(from, bounds)?, number(to, bounds)?),
        _ => return Err(format!("too many hyphens: {expression}")),
    };
    let step = match step {
        Some(step) => {
            if !span.contains(['-', '*', '?']) {
                end = bounds.max;
            }
            number(step, bounds)?
        }
        None => 1,
    };
    if start < bounds.min {
        return Err(format!(
            "beginning of range ({start}) below minimum ({}): {expression}",
            bounds.min
        ));
    }
    if end > bounds.max {
        return Err(format!(
            "end of range ({end}) above maximum ({}): {expression}",
            bounds.max
        ));
    }
    if start > end {
        return Err(format!(
            "beginning of range ({start}) beyond end of range ({end}): {expression}"
        ));
    }
    if step == 0 {
        return Err(format!("step of range should be a positive number: {expression}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn schedules() {
        for good in ["* * * * *", "*/5 0-6 1,15 jan-mar mon", "@daily", "@every 1h"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, why) in [
            ("x", "expected exactly 5 fields, found 1: [x]"),
            ("60 * * * *", "end of range (60) above maximum (59): 60"),
            ("* * 0 * *", "beginning of range (0) below minimum (1): 0"),
            (
                "5-1 * * * *",
                "beginning of range (5) beyond end of range (1): 5-1",
            ),
            ("*/0 * * * *", "step of range should be a positive number: */0"),
            ("@x", "unrecognized descriptor: @x"),
        ] {
            assert_eq!(check(bad), Err(why.to_owned()), "{bad}");
        }
    }
}
