//! What README and docs tell people to type: commands exist, flags exist, and the first five minutes work as shown.

use anyhow::{Context, Result, bail, ensure};
use skiff_testkit::Cluster;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const SKIFF: &str = env!("CARGO_BIN_EXE_skiff");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README and everything in docs/, with the name that an error shows.
fn pages() -> Result<Vec<(String, String)>> {
    let mut pages = vec!["README.md".to_owned()];
    for entry in std::fs::read_dir(root().join("docs"))? {
        pages.push(format!("docs/{}", entry?.file_name().to_string_lossy()));
    }
    pages.retain(|page| page.ends_with(".md"));
    pages.sort();
    let read = |page: String| {
        let text = std::fs::read_to_string(root().join(&page)).with_context(|| page.clone())?;
        Ok((page, text))
    };
    pages.into_iter().map(read).collect()
}

/// What stands in backquotes, and the lines of code blocks.
fn code(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut prose = String::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            found.push(line.trim_start_matches("# ").to_owned());
        } else {
            prose.push_str(line);
            prose.push(' ');
        }
    }
    found.extend(prose.split('`').skip(1).step_by(2).map(str::to_owned));
    found
}

/// Pages that name what is not built.
fn unbuilt(page: &str) -> bool {
    matches!(page, "docs/limits.md" | "docs/conformance.md")
}

fn help(args: &[&str]) -> Result<String> {
    let output = Command::new(SKIFF).args(args).arg("--help").output()?;
    ensure!(output.status.success(), "skiff {args:?} --help fails");
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn make_targets_exist() -> Result<()> {
    let makefile = std::fs::read_to_string(root().join("Makefile"))?;
    let targets: BTreeSet<&str> = makefile
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(target, _)| target)
        .collect();
    let mut seen = 0;
    for (page, text) in pages()? {
        for code in code(&text) {
            let Some(rest) = code.strip_prefix("make ") else {
                continue;
            };
            let words = rest.split_whitespace().take_while(|word| !word.starts_with('#'));
            for word in words.filter(|word| !word.contains('=')) {
                ensure!(targets.contains(word), "{page}: there is no `make {word}`");
                seen += 1;
            }
        }
    }
    ensure!(seen > 3, "only {seen} were found, so this proves nothing");
    Ok(())
}

#[test]
fn commands_and_flags_of_skiff_exist() -> Result<()> {
    let overview = help(&[])?;
    let is_command = |word: &str| {
        let line = format!("  {word} ");
        overview.lines().any(|l| l.starts_with(&line))
    };
    let mut seen = BTreeSet::new();
    for (page, text) in pages()? {
        for code in code(&text) {
            let Some(rest) = code.strip_prefix("skiff ") else {
                continue;
            };
            let words: Vec<&str> = rest
                .split_whitespace()
                .take_while(|word| !word.starts_with('#'))
                .collect();
            let Some(command) = words.first() else { continue };
            // Output begins with the name, too.
            if !command.bytes().all(|byte| byte.is_ascii_lowercase()) || unbuilt(&page) {
                continue;
            }
            ensure!(
                is_command(command),
                "{page}: there is no `skiff {command}` ({code})"
            );
            let flags = words.iter().filter(|word| word.starts_with("--"));
            let mut known = help(&[command])?;
            // Flags of a subcommand are in its own help.
            if let Some(sub) = words.get(1)
                && known.lines().any(|line| line.starts_with(&format!("  {sub} ")))
            {
                known.push_str(&help(&[command, sub])?);
            }
            for flag in flags {
                let flag = flag.split('=').next().unwrap_or_default().trim_end_matches(']');
                ensure!(known.contains(flag), "{page}: `skiff {command}` has no {flag}");
            }
            seen.insert(command.to_string());
        }
    }
    ensure!(seen.len() > 4, "only {seen:?} were found, so this proves nothing");
    Ok(())
}

/// The pages that teach by the code of the tree.
const CODE_PAGES: [&str; 2] = ["docs/adding-a-controller.md", "docs/adding-a-scheduler-plugin.md"];

/// The sources of the crates that those pages are about, by path.
fn sources() -> Result<Vec<(PathBuf, String)>> {
    let crates = ["auth", "client", "controllers", "scheduler", "testkit"];
    let mut folders: Vec<PathBuf> = crates.map(|name| root().join("crates").join(name)).into();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path)?;
                found.push((path, text));
            }
        }
    }
    Ok(found)
}

/// Code without what formatting decides.
fn bare(code: &str) -> String {
    let text: String = code.chars().filter(|char| !char.is_whitespace()).collect();
    text.replace(",}", "}").replace(",)", ")")
}

/// Whether the code has the lines of an example; `…` in it stands for anything.
fn has_example(code: &str, example: &str) -> bool {
    let mut pieces = example.split('…').map(bare).filter(|piece| !piece.is_empty());
    let found = pieces.try_fold(code, |rest, piece| {
        let at = rest.find(&piece)?;
        Some(&rest[at + piece.len()..])
    });
    found.is_some()
}

#[test]
fn the_code_in_the_docs_is_that_of_the_tree() -> Result<()> {
    let sources = sources()?;
    let bare_sources: Vec<String> = sources.iter().map(|(_, text)| bare(text)).collect();
    let all = sources.iter().fold(String::new(), |all, (_, text)| all + text);
    for page in CODE_PAGES {
        let text = std::fs::read_to_string(root().join(page))?;
        let blocks: Vec<&str> = text
            .split("```rust\n")
            .skip(1)
            .filter_map(|rest| rest.split("```").next())
            .collect();
        ensure!(blocks.len() > 1, "{page} shows no code");
        for block in blocks {
            let known = bare_sources.iter().any(|code| has_example(code, block));
            ensure!(known, "{page}: no file has this code:\n{block}");
        }
        for name in code(&text) {
            let is_one_name = |c: char| c.is_ascii_alphanumeric() || "_:/.-".contains(c);
            if name.ends_with(".rs") && name.chars().all(is_one_name) {
                let there =
                    sources.iter().any(|(path, _)| path.ends_with(&name)) || root().join(&name).exists();
                ensure!(there, "{page}: there is no file {name}");
                continue;
            }
            // The last part of a path, or what stands before the arguments.
            let word = name.split(['(', '!']).next().unwrap_or_default();
            let word = word.rsplit(['.', ':']).next().unwrap_or_default();
            let is_identifier =
                !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if is_identifier && !name.contains(' ') {
                ensure!(all.contains(word), "{page}: nothing is called `{name}`");
            }
        }
    }
    Ok(())
}

#[test]
fn examples_are_compared_without_their_format() {
    let code = bare("fn a() {\n    b(\n        1,\n    );\n    c();\n}");
    assert!(has_example(&code, "fn a() {\n    …\n    c();\n}"));
    assert!(has_example(&code, "b(1);"));
    assert!(!has_example(&code, "b(2);"));
    assert!(!has_example(&code, "c();\n…\nb(1);"), "the order counts");
}

/// A command that the README shows, and what it says that it prints.
struct Shown {
    command: String,
    output: Vec<String>,
}

/// The commands after a `#` prompt in the first five minutes.
fn five_minutes() -> Result<Vec<Shown>> {
    let readme = std::fs::read_to_string(root().join("README.md"))?;
    let (_, rest) = readme
        .split_once("## The first five minutes")
        .context("the README has no first five minutes")?;
    let part = rest.split("\n## ").next().unwrap_or_default();
    let mut shown: Vec<Shown> = Vec::new();
    let mut in_block = false;
    for line in part.lines() {
        if line.starts_with("```") {
            in_block = !in_block;
        } else if in_block && let Some(command) = line.strip_prefix("# ") {
            shown.push(Shown {
                command: command.to_owned(),
                output: Vec::new(),
            });
        } else if in_block && let Some(last) = shown.last_mut() {
            last.output.push(line.to_owned());
        }
    }
    Ok(shown)
}

/// What a line is about: its first word, without what differs from run to run.
fn sort_of(line: &str) -> Option<String> {
    let word = line.split_whitespace().next()?;
    let stable = word.split(|c: char| c.is_ascii_digit() || c == '-').next()?;
    (!stable.is_empty()).then(|| stable.to_owned())
}

#[test]
fn the_first_five_minutes_are_as_the_readme_shows_them() -> Result<()> {
    let name = Cluster::new_name();
    let home = tempfile::tempdir()?;
    let bin = Path::new(SKIFF).parent().context("the binary has no folder")?;
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let run = |command: &str| {
        Command::new("sh")
            .args(["-c", command])
            .current_dir(root())
            .env("PATH", &path)
            .env("HOME", home.path())
            .env("KUBECONFIG", home.path().join("config"))
            .env("SKIFF_NAME", &name)
            .output()
    };
    let commands = five_minutes()?;
    ensure!(commands.len() > 6, "only {} commands were found", commands.len());
    let mut failure = None;
    for shown in &commands {
        let output = run(&shown.command)?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            failure = Some(format!("{}: {error}", shown.command));
            break;
        }
        let sorts: BTreeSet<String> = printed.lines().filter_map(sort_of).collect();
        // How a trace goes on is another thing each time.
        let lines = if shown.command.contains("trace") {
            1
        } else {
            usize::MAX
        };
        let missing = shown.output.iter().take(lines).filter_map(|line| sort_of(line));
        if let Some(missing) = missing.into_iter().find(|sort| !sorts.contains(sort)) {
            failure = Some(format!("{} prints no {missing:?}:\n{printed}", shown.command));
            break;
        }
        if shown.command.contains("kubectl apply") {
            // People type slower than a script.
            run("kubectl rollout status deployment/web --timeout=90s")?;
        }
    }
    let deleted = Command::new(SKIFF)
        .args(["down", "--delete", "--name", &name])
        .output()?;
    ensure!(
        deleted.status.success(),
        "{}",
        String::from_utf8_lossy(&deleted.stderr)
    );
    match failure {
        Some(failure) => bail!(failure),
        None => Ok(()),
    }
}
