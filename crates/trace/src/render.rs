//! The waterfall as text for a terminal. It only draws; what the path is was decided before.

use crate::Waterfall;
use std::fmt::Write;

impl Waterfall {
    /// Draws the path with one bar a step, at most `width` columns for the bars.
    pub fn render(&self, width: usize) -> String {
        let mut text = String::new();
        let total = self.total_us.max(1);
        let _ = writeln!(
            text,
            "{} at resourceVersion {}: {} from the request to the last of its {} writes\n",
            self.object,
            self.resource_version,
            millis(self.total_us),
            self.writes
        );
        let actors = self
            .steps
            .iter()
            .map(|s| short(&s.actor).len())
            .max()
            .unwrap_or(0);
        let whats = self.steps.iter().map(|s| s.what.len()).max().unwrap_or(0);
        let _ = writeln!(
            text,
            "{:>10} {:>10}  {:<actors$}  {:<whats$}",
            "AT", "TOOK", "WHO", "WHAT"
        );
        for step in &self.steps {
            let scale =
                |us: i64| usize::try_from(us).unwrap_or(0) * width / usize::try_from(total).unwrap_or(1);
            let (from, to) = (scale(step.start_us), scale(step.start_us + step.dur_us));
            let bar = format!("{}{}", " ".repeat(from), "█".repeat((to - from).max(1)));
            let _ = writeln!(
                text,
                "{:>10} {:>10}  {:<actors$}  {:<whats$}  {bar}",
                millis(step.start_us),
                millis(step.dur_us),
                plain(short(&step.actor)),
                plain(&step.what)
            );
            // Gates below the last digit shown would only be noise.
            let gates = step.gates.iter().filter(|g| g.dur_us >= 10);
            let gates: Vec<String> = gates
                .map(|g| format!("{} {}", g.name, millis(g.dur_us)))
                .collect();
            if !gates.is_empty() {
                let _ = writeln!(text, "{:>23}{:<actors$}  └ {}", "", "", gates.join(", "));
            }
        }
        let _ = writeln!(text, "{:>10} {:>10}  total", "", millis(self.total_us));
        text
    }
}

fn millis(us: i64) -> String {
    format!("{}.{:02} ms", us / 1000, us % 1000 / 10)
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
    use crate::Step;

    #[test]
    fn names_cannot_steer_the_terminal() {
        let step = Step {
            start_us: 0,
            dur_us: 1_000,
            actor: "system:node:\x1b[2Jme".into(),
            what: "write\n".into(),
            gates: vec![],
        };
        let drawn = Waterfall {
            object: "pods p".into(),
            resource_version: "1".into(),
            total_us: 1_000,
            steps: vec![step],
            writes: 1,
        }
        .render(10);
        assert!(drawn.contains("?[2Jme  write?  ██████████"), "{drawn}");
    }
}
