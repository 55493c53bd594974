//! `/version`.

use serde_json::{Value, json};

const ORDER: [&str; 13] = [
    "major",
    "minor",
    "emulationMajor",
    "emulationMinor",
    "minCompatibilityMajor",
    "minCompatibilityMinor",
    "gitVersion",
    "gitCommit",
    "gitTreeState",
    "buildDate",
    "goVersion",
    "compiler",
    "platform",
];

/// What the server says it is.
#[derive(Clone, Debug)]
pub struct Version {
    pub git_version: String,
    pub git_commit: String,
    pub build_date: String,
}

impl Default for Version {
    fn default() -> Self {
        Version {
            git_version: "v1.36.4+skiff".to_string(),
            git_commit: String::new(),
            build_date: "1970-01-01T00:00:00Z".to_string(),
        }
    }
}

impl Version {
    /// For people to read, in upstream's order.
    pub fn to_text(&self) -> String {
        let value = self.to_value();
        let lines: Vec<String> = ORDER
            .iter()
            .map(|key| format!("  \"{key}\": {}", value[*key]))
            .collect();
        format!("{{\n{}\n}}", lines.join(",\n"))
    }

    pub fn to_value(&self) -> Value {
        let mut numbers = self.git_version.trim_start_matches('v').split('.');
        let (major, minor) = (numbers.next().unwrap_or("1"), numbers.next().unwrap_or(""));
        json!({
            "major": major, "minor": minor,
            "emulationMajor": major, "emulationMinor": minor,
            "minCompatibilityMajor": major, "minCompatibilityMinor": minor.parse::<u32>().map_or(String::new(), |n| (n.saturating_sub(1)).to_string()),
            "gitVersion": self.git_version, "gitCommit": self.git_commit, "gitTreeState": "clean",
            "buildDate": self.build_date, "goVersion": "go1.26.0", "compiler": "gc",
            "platform": format!("{}/{}", std::env::consts::OS, arch()),
        })
    }
}

/// Go's name of this architecture, which clients compare with image platforms.
fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_all() {
        let version = Version::default();
        let read: Value = serde_json::from_str(&version.to_text()).expect("JSON");
        assert_eq!(read, version.to_value());
        assert!(version.to_text().starts_with("{\n  \"major\": \"1\",\n"));
    }
}
