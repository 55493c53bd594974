//! The steps of a start, each with its time. The server reports them; `skiff up` shows them.

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

/// One line from the starting server to `skiff up`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Report {
    Started {
        step: String,
    },
    /// `at_us` counts from the beginning of the start: some steps run beside others.
    Done {
        step: String,
        took_us: u64,
        at_us: u64,
    },
    /// What a step waits for.
    Waiting {
        why: String,
    },
    Ready {
        took_us: u64,
    },
    Failed {
        message: String,
    },
}

/// The step that ends when the node is Ready.
pub const NODE_READY: &str = "node Ready";

/// When a start was over, counted from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    pub total: Duration,
    /// `None`: this machine is no node.
    pub node_ready: Option<Duration>,
}

/// The server's side. Reports go to stdout as JSON lines when a parent listens, else to the log.
pub struct Reporter {
    began: Instant,
    /// Present until the start is over. A leaf lock.
    parent: Mutex<Option<std::io::Stdout>>,
    /// What was last waited for. A leaf lock.
    waiting: Mutex<Option<String>>,
}

impl Reporter {
    pub fn new(has_parent: bool) -> Self {
        Self {
            began: Instant::now(),
            parent: Mutex::new(has_parent.then(std::io::stdout)),
            waiting: Mutex::default(),
        }
    }

    fn send(&self, report: &Report) {
        if let Some(parent) = self.parent.lock().as_mut()
            && let Ok(mut line) = serde_json::to_vec(report)
        {
            line.push(b'\n');
            // The parent may be gone (Ctrl-C): the start goes on without it.
            let _ = parent.write_all(&line).and_then(|()| parent.flush());
        }
    }

    /// Runs one step and reports its time.
    pub async fn step<T, E>(&self, name: &str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        self.send(&Report::Started {
            step: name.to_owned(),
        });
        let began = Instant::now();
        let result = work.await;
        if result.is_ok() {
            let took = began.elapsed();
            tracing::info!(step = name, ms = took.as_secs_f64() * 1e3, "started");
            self.send(&Report::Done {
                step: name.to_owned(),
                took_us: micros(took),
                at_us: micros(self.began.elapsed()),
            });
        }
        result
    }

    /// Says what a step waits for, once.
    pub fn waiting(&self, why: &str) {
        let mut last = self.waiting.lock();
        if last.as_deref() != Some(why) {
            *last = Some(why.to_owned());
            tracing::info!(why, "waiting");
            self.send(&Report::Waiting { why: why.to_owned() });
        }
    }

    /// What was last waited for.
    pub fn waited_for(&self) -> Option<String> {
        self.waiting.lock().clone()
    }

    pub fn ready(&self) {
        let took = self.began.elapsed();
        tracing::info!(ms = took.as_secs_f64() * 1e3, "ready");
        self.send(&Report::Ready {
            took_us: micros(took),
        });
        self.hang_up();
    }

    pub fn failed(&self, message: &str) {
        self.send(&Report::Failed {
            message: message.to_owned(),
        });
        self.hang_up();
    }

    /// Closes the pipe to the parent, so that it sees the end and nothing later can block on it.
    fn hang_up(&self) {
        if self.parent.lock().take().is_some()
            && let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null")
            && let Err(error) = rustix::stdio::dup2_stdout(null)
        {
            tracing::warn!(%error, "cannot detach from the terminal");
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// `skiff up`'s side: draws the steps until the server is ready. `Err` has the server's own words; `Ok(None)`
/// means that it ended without a word.
pub fn show(reports: impl Read) -> Result<Option<Times>, String> {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("  {spinner} {msg}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(80));
    let mut open: Vec<String> = Vec::new();
    let mut node_ready = None;
    for line in BufReader::new(reports).lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Report::Started { step }) => open.push(step),
            Ok(Report::Done { step, took_us, at_us }) => {
                open.retain(|s| *s != step);
                if step == NODE_READY {
                    node_ready = Some(Duration::from_micros(at_us));
                }
                let line = done_line(&step, took_us);
                // Without a terminal indicatif prints nothing.
                if bar.is_hidden() {
                    say!("{line}");
                } else {
                    bar.println(line)
                }
            }
            Ok(Report::Waiting { why }) => {
                let line = format!("    waiting: {why}");
                if bar.is_hidden() {
                    say!("{line}");
                } else {
                    bar.println(line)
                }
            }
            Ok(Report::Ready { took_us }) => {
                bar.finish_and_clear();
                let total = Duration::from_micros(took_us);
                return Ok(Some(Times { total, node_ready }));
            }
            Ok(Report::Failed { message }) => {
                bar.finish_and_clear();
                return Err(message);
            }
            Err(_) => {}
        }
        bar.set_message(open.join(", "));
    }
    bar.finish_and_clear();
    Ok(None)
}

impl Times {
    /// The same, counted from a beginning that was this much earlier.
    pub fn after(self, before: Duration) -> Times {
        Times {
            total: self.total + before,
            node_ready: self.node_ready.map(|ready| ready + before),
        }
    }
}

/// The steps of a command itself, shown as those of a server are.
pub struct Steps;

impl Steps {
    pub async fn step<T, E>(&self, name: &str, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let began = Instant::now();
        let result = work.await;
        if result.is_ok() {
            say!("{}", done_line(name, micros(began.elapsed())));
        }
        result
    }
}

fn done_line(step: &str, took_us: u64) -> String {
    format!("  ✓ {step:<28} {:>9}", millis(took_us))
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let total = millis(micros(self.total));
        match self.node_ready {
            Some(ready) => write!(
                f,
                "The node is Ready after {}, everything is up after {total}.",
                millis(micros(ready))
            ),
            None => write!(
                f,
                "The API server is ready after {total}; this machine is no node."
            ),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "for display")]
fn millis(us: u64) -> String {
    format!("{:.1} ms", us as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(reports: &[Report]) -> Vec<u8> {
        reports
            .iter()
            .flat_map(|r| [serde_json::to_vec(r).unwrap(), b"\n".to_vec()].concat())
            .collect()
    }

    #[test]
    fn the_end_of_a_start_is_told_apart() {
        let done = |step: &str| Report::Done {
            step: step.into(),
            took_us: 2,
            at_us: 5,
        };
        let (step, micros) = (done("store"), Duration::from_micros);
        let check = |steps: &[Report], node_ready: Option<Duration>| {
            let total = micros(7);
            let ready = show(&lines(&[steps, &[Report::Ready { took_us: 7 }]].concat())[..]);
            assert_eq!(ready, Ok(Some(Times { total, node_ready })));
        };
        check(std::slice::from_ref(&step), None);
        check(&[step.clone(), done(NODE_READY)], Some(micros(5)));
        let failed = show(&lines(&[step.clone(), Report::Failed { message: "no".into() }])[..]);
        assert_eq!(failed, Err("no".into()));
        assert_eq!(show(&lines(&[step])[..]), Ok(None));
    }
}
