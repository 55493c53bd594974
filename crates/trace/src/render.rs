//! The waterfall as text for a terminal. It only draws; what the path is was decided before.

use crate::{Stage, Step, Waterfall};
use std::fmt::Write;

/// The columns of AT and TOOK, and the blanks after them.
const TIMES: usize = 23;
const LONGEST_ACTOR: usize = 26;
const LONGEST_BAR: usize = 40;
const SHORTEST_BAR: usize = 8;
/// On a narrower terminal the bars are left out.
const SHORTEST_WHAT: usize = 24;
/// Steps that took less than this share of the whole are drawn together.
const FOLD_PERCENT: i64 = 1;
/// Cyan, yellow, magenta, green, blue, red: one a component, in the order in which they appear.
const COLORS: [u8; 6] = [36, 33, 35, 32, 34, 31];

/// What it is drawn on.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    pub columns: usize,
    pub color: bool,
}

impl Waterfall {
    /// The step, or the steps of one name together, that took the most, with their share in percent.
    pub fn longest(&self) -> Option<(&str, i64)> {
        let sum = |what: &str| -> i64 {
            let same = self.steps.iter().filter(|step| step.what == what);
            same.map(|step| step.dur_us).sum()
        };
        let longest = self.steps.iter().max_by_key(|step| sum(&step.what))?;
        Some((&longest.what, sum(&longest.what) * 100 / self.total_us.max(1)))
    }

    /// Draws the path with one bar a step.
    pub fn render(&self, style: Style) -> String {
        let rows = self.rows();
        let width = |wanted: usize, longest: usize| wanted.min(longest);
        let length = |text: &str| text.chars().count();
        let actors = rows.iter().map(|row| length(&row.actor)).max().unwrap_or(0);
        let actors = width(actors, LONGEST_ACTOR);
        let mut bars = (style.columns / 6).clamp(SHORTEST_BAR, LONGEST_BAR);
        let whats = rows.iter().map(|row| length(&row.what)).max().unwrap_or(0);
        let mut room = style.columns.saturating_sub(TIMES + actors + bars + 4);
        if room < SHORTEST_WHAT {
            room += bars + 2;
            bars = 0;
        }
        let whats = width(whats, room);
        let mut text = String::new();
        let _ = writeln!(text, "{:>10} {:>10}  {:<actors$}  WHAT", "AT", "TOOK", "WHO");
        let mut seen: Vec<&str> = Vec::new();
        for row in &rows {
            let place = seen.iter().position(|actor| *actor == row.actor);
            let place = place.unwrap_or_else(|| {
                seen.push(&row.actor);
                seen.len() - 1
            });
            let (on, off) = if style.color && !row.actor.is_empty() {
                (format!("\x1b[{}m", COLORS[place % COLORS.len()]), "\x1b[0m")
            } else {
                (String::new(), "")
            };
            let _ = writeln!(
                text,
                "{:>10} {:>10}  {on}{:<actors$}{off}  {:<whats$}  {on}{}{off}",
                human(row.start_us),
                human(row.dur_us),
                cut(&row.actor, actors),
                cut(&row.what, whats),
                self.bar(row, bars),
            );
            let gates = gates(
                row.gates,
                self.total_us,
                style.columns.saturating_sub(TIMES + actors + 4),
            );
            if !gates.is_empty() {
                let _ = writeln!(text, "{:>TIMES$}{:<actors$}  └ {gates}", "", "");
            }
        }
        let _ = writeln!(text, "{:>10} {:>10}  total", "", human(self.total_us));
        text
    }

    fn bar(&self, row: &Row<'_>, width: usize) -> String {
        let scale = |us: i64| {
            let part = i128::from(us.max(0)) * width as i128 / i128::from(self.total_us.max(1));
            usize::try_from(part).unwrap_or(0).min(width)
        };
        let (from, to) = (scale(row.start_us), scale(row.start_us + row.dur_us));
        let from = from.min(width.saturating_sub(1));
        format!(
            "{}{}",
            " ".repeat(from),
            "█".repeat(to.saturating_sub(from).max(width.min(1)))
        )
    }

    /// The steps, with neighbours that took next to nothing drawn as one. The first and the last always stand.
    fn rows(&self) -> Vec<Row<'_>> {
        let is_small = |at: usize| {
            at != 0
                && at + 1 != self.steps.len()
                && self.steps[at].dur_us * 100 < self.total_us * FOLD_PERCENT
        };
        let mut rows = Vec::new();
        let mut at = 0;
        while at < self.steps.len() {
            let small = (at..self.steps.len()).take_while(|at| is_small(*at)).count();
            if small < 2 {
                let step = &self.steps[at];
                // Alone among longer ones, what rounds to nothing says nothing.
                if small == 0 || step.dur_us * 1000 >= self.total_us {
                    rows.push(Row::of(step));
                }
                at += 1;
                continue;
            }
            let folded = &self.steps[at..at + small];
            rows.push(Row {
                start_us: folded[0].start_us,
                dur_us: folded.iter().map(|step| step.dur_us).sum(),
                actor: String::new(),
                what: format!("{small} steps under {FOLD_PERCENT} %"),
                gates: &[],
            });
            at += small;
        }
        rows
    }
}

/// One line: a step, or several small ones.
struct Row<'a> {
    start_us: i64,
    dur_us: i64,
    actor: String,
    what: String,
    gates: &'a [Stage],
}

impl<'a> Row<'a> {
    fn of(step: &'a Step) -> Self {
        Row {
            start_us: step.start_us,
            dur_us: step.dur_us,
            actor: plain(short(&step.actor)),
            what: match step.server.as_str() {
                "" => plain(&step.what),
                server => plain(&format!("{} [{server}]", step.what)),
            },
            gates: &step.gates,
        }
    }
}

/// The gates that took a share worth a word, the longest first, as many as fit.
fn gates(gates: &[Stage], total_us: i64, room: usize) -> String {
    let mut gates: Vec<&Stage> = gates
        .iter()
        .filter(|gate| gate.dur_us * 100 >= total_us * FOLD_PERCENT)
        .collect();
    gates.sort_by_key(|gate| std::cmp::Reverse(gate.dur_us));
    let mut text = String::new();
    for gate in gates {
        let next = format!("{} {}", plain(&gate.name), human(gate.dur_us));
        let separator = if text.is_empty() { "" } else { ", " };
        if text.chars().count() + separator.len() + next.chars().count() > room {
            break;
        }
        let _ = write!(text, "{separator}{next}");
    }
    text
}

/// A duration for people: `212.64 ms`, `3.17 s`.
pub fn human(us: i64) -> String {
    match us {
        10_000_000.. => format!("{}.{} s", us / 1_000_000, us % 1_000_000 / 100_000),
        1_000_000.. => format!("{}.{:02} s", us / 1_000_000, us % 1_000_000 / 10_000),
        _ => format!("{}.{:02} ms", us / 1000, us % 1000 / 10),
    }
}

fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{kept}…")
}

/// `system:serviceaccount:kube-system:deployment-controller` reads better as its last part.
fn short(user: &str) -> &str {
    user.rsplit(':').next().unwrap_or(user)
}

/// Users and stages name themselves; a terminal must not take their names for orders.
fn plain(text: &str) -> String {
    text.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(start_us: i64, dur_us: i64, actor: &str, what: &str) -> Step {
        Step {
            start_us,
            dur_us,
            actor: actor.into(),
            what: what.into(),
            gates: vec![],
            server: String::new(),
        }
    }

    fn waterfall(steps: Vec<Step>) -> Waterfall {
        Waterfall {
            object: "pods p".into(),
            request: "create pods p".into(),
            resource_version: "1".into(),
            complete: true,
            total_us: steps.iter().map(|step| step.dur_us).sum(),
            steps,
            writes: 1,
            later: 0,
        }
    }

    const PLAIN: Style = Style {
        columns: 80,
        color: false,
    };

    #[test]
    fn names_cannot_steer_the_terminal() {
        let drawn = waterfall(vec![step(0, 1_000, "system:node:\x1b[2Jme", "write\n")]).render(PLAIN);
        assert!(drawn.contains("?[2Jme  write?  █████████████\n"), "{drawn}");
    }

    #[test]
    fn small_steps_are_folded_and_lines_fit() {
        let long = "create endpointslices.discovery.k8s.io ".to_owned() + &"x".repeat(100);
        let mut steps = vec![step(0, 50, "kubernetes-admin", "create pods p")];
        steps.extend((0..5).map(|n| step(50 + n, 1, "a", "tiny")));
        steps.push(step(
            55,
            900_000,
            "system:node:vm",
            "waiting for readiness (initialDelaySeconds 3)",
        ));
        steps.push(step(900_055, 100_000, "a", &long));
        let mut drawn = waterfall(steps);
        drawn.steps[6].gates = (0..20)
            .map(|n| Stage {
                name: format!("gate-{n}"),
                start_us: 55,
                dur_us: 40_000,
            })
            .collect();
        assert_eq!(
            drawn.longest(),
            Some(("waiting for readiness (initialDelaySeconds 3)", 89))
        );
        for columns in [60, 80, 200] {
            let text = drawn.render(Style { columns, ..PLAIN });
            assert!(
                text.contains("5 steps under 1 %") && !text.contains("tiny"),
                "{text}"
            );
            let widest = text.lines().map(|line| line.trim_end().chars().count()).max();
            assert!(widest <= Some(columns), "{columns}: {widest:?}\n{text}");
        }
        let colored = drawn.render(Style { color: true, ..PLAIN });
        assert!(colored.contains("\x1b[36mkubernetes-admin"), "{colored}");
    }

    #[test]
    fn durations_read_well() {
        for (us, text) in [
            (0, "0.00 ms"),
            (212_640, "212.64 ms"),
            (3_170_000, "3.17 s"),
            (61_250_000, "61.2 s"),
        ] {
            assert_eq!(human(us), text);
        }
    }
}
