//! For which operating system and processor an image is, and which of an index fits best.

use super::config::Descriptor;
use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// `linux/arm/v7`, by Go's names, in the one form of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    os: String,
    architecture: String,
    /// Empty for the usual one of the architecture.
    variant: String,
}

/// The platform of an index's entry, as it is written there.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct DescribedPlatform {
    os: String,
    architecture: String,
    variant: String,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a platform of linux: linux/ARCHITECTURE or linux/ARCHITECTURE/VARIANT")]
pub struct InvalidPlatform(String);

impl Platform {
    pub fn of_this_machine() -> Platform {
        Platform::new("linux", std::env::consts::ARCH, "")
    }

    pub(super) fn architecture(&self) -> &str {
        &self.architecture
    }

    /// COMPAT: other names of the same are those that containerd takes.
    fn new(os: &str, architecture: &str, variant: &str) -> Platform {
        let (architecture, variant) = (architecture.to_ascii_lowercase(), variant.to_ascii_lowercase());
        let (architecture, usual) = match architecture.as_str() {
            "i386" | "x86" => ("386", ""),
            "x86_64" | "x86-64" => ("amd64", ""),
            "aarch64" => ("arm64", ""),
            "armhf" => ("arm", "v7"),
            "armel" => ("arm", "v6"),
            other => (other, ""),
        };
        let variant = if variant.is_empty() {
            usual.to_owned()
        } else {
            variant
        };
        let variant = match variant.strip_prefix('v').unwrap_or(&variant) {
            number if number.starts_with(|first: char| first.is_ascii_digit()) => format!("v{number}"),
            _ => variant,
        };
        let variant = match (architecture, variant.as_str()) {
            ("amd64", "v1") | ("arm64", "v8") | ("arm", "v7") => String::new(),
            _ => variant,
        };
        Platform {
            os: os.to_ascii_lowercase(),
            architecture: architecture.to_owned(),
            variant,
        }
    }

    /// The entry of an index that fits best; an index of one entry without a platform is that one.
    pub(super) fn choose<'a>(&self, entries: &'a [Descriptor]) -> Option<&'a Descriptor> {
        let mut best: Option<(&Descriptor, Rank)> = None;
        for entry in entries {
            let rank = entry.platform.as_ref().and_then(|platform| {
                self.runs(&Platform::new(
                    &platform.os,
                    &platform.architecture,
                    &platform.variant,
                ))
            });
            if let Some(rank) = rank
                && best.as_ref().is_none_or(|(_, other)| rank > *other)
            {
                best = Some((entry, rank));
            }
        }
        match (best, entries) {
            (Some((entry, _)), _) => Some(entry),
            (None, [only]) if only.platform.is_none() => Some(only),
            _ => None,
        }
    }

    /// How well this platform runs programs of that one.
    fn runs(&self, other: &Platform) -> Option<Rank> {
        if self.os != other.os {
            return None;
        }
        if self.architecture == other.architecture {
            if self.variant == other.variant {
                return Some((true, (u32::MAX, 0)));
            }
            let level = other.level()?;
            return (level <= self.level()?).then_some((true, level));
        }
        // COMPAT: containerd falls back to the 32 bits of the same family.
        match (self.architecture.as_str(), other.architecture.as_str()) {
            ("amd64", "386") => Some((false, (0, 0))),
            ("arm64", "arm") => other.level().map(|level| (false, level)),
            _ => None,
        }
    }

    /// Variants are numbered, and each runs what is for a lower one.
    fn level(&self) -> Option<(u32, u32)> {
        let usual = match self.architecture.as_str() {
            "amd64" => "1",
            "arm64" => "8",
            "arm" => "7",
            _ => return None,
        };
        let number = match self.variant.as_str() {
            "" => usual,
            variant => variant.strip_prefix('v')?,
        };
        let (major, minor) = number.split_once('.').unwrap_or((number, "0"));
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

/// Of two entries the larger one is taken: of this architecture, and the highest variant.
type Rank = (bool, (u32, u32));

impl FromStr for Platform {
    type Err = InvalidPlatform;

    fn from_str(text: &str) -> Result<Platform, InvalidPlatform> {
        let invalid = || InvalidPlatform(text.to_owned());
        let parts: Vec<&str> = text.split('/').collect();
        let is_word = |part: &&str| {
            !part.is_empty()
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
        };
        let platform = match parts.as_slice() {
            [os, architecture] => Platform::new(os, architecture, ""),
            [os, architecture, variant] => Platform::new(os, architecture, variant),
            _ => return Err(invalid()),
        };
        if platform.os != "linux" || !parts.iter().all(is_word) {
            return Err(invalid());
        }
        Ok(platform)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.os, self.architecture)?;
        if self.variant.is_empty() {
            return Ok(());
        }
        write!(formatter, "/{}", self.variant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_read() {
        let check = |text: &str, expected: Option<&str>| {
            let read = text.parse::<Platform>().ok().map(|platform| platform.to_string());
            assert_eq!(read.as_deref(), expected, "{text}");
        };
        check("linux/amd64", Some("linux/amd64"));
        check("Linux/x86_64", Some("linux/amd64"));
        check("linux/arm64/v8", Some("linux/arm64"));
        check("linux/aarch64", Some("linux/arm64"));
        check("linux/arm/7", Some("linux/arm"));
        check("linux/armel", Some("linux/arm/v6"));
        check("linux/amd64/v3", Some("linux/amd64/v3"));
        check("linux/riscv64", Some("linux/riscv64"));
        check("windows/amd64", None);
        check("amd64", None);
        check("linux/", None);
        check("linux/amd64/v1/x", None);
        check("linux/a b", None);
        check("", None);
    }

    #[test]
    fn the_best_entry_is_chosen() {
        let check = |wanted: &str, offered: &[&str], expected: Option<usize>| {
            let entries: Vec<Descriptor> = offered
                .iter()
                .enumerate()
                .map(|(at, platform)| {
                    let parts: Vec<&str> = platform.split('/').collect();
                    serde_json::from_value(serde_json::json!({
                        "digest": at.to_string(),
                        "platform": {"os": parts[0], "architecture": parts[1],
                            "variant": parts.get(2).copied().unwrap_or_default()},
                    }))
                    .expect("an entry")
                })
                .collect();
            let wanted: Platform = wanted.parse().expect("a platform");
            let chosen = wanted
                .choose(&entries)
                .map(|entry| entry.digest.parse().expect("a number"));
            assert_eq!(chosen, expected, "{wanted} of {offered:?}");
        };
        let usual = [
            "linux/386",
            "linux/arm/v6",
            "linux/arm/v7",
            "linux/arm64/v8",
            "linux/amd64",
            "linux/amd64",
        ];
        check("linux/amd64", &usual, Some(4));
        check("linux/arm64", &usual, Some(3));
        check("linux/arm", &usual, Some(2));
        check("linux/arm/v6", &usual, Some(1));
        check("linux/arm/v5", &usual, None);
        check("linux/s390x", &usual, None);
        check("linux/amd64", &["windows/amd64", "unknown/unknown"], None);
        check("linux/amd64", &["linux/amd64/v2"], None);
        check(
            "linux/amd64/v3",
            &["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"],
            Some(1),
        );
        check("linux/amd64", &["linux/386"], Some(0));
        check("linux/arm64", &["linux/arm/v6", "linux/arm/v7"], Some(1));
        check("linux/riscv64", &["linux/riscv64"], Some(0));
    }
}
