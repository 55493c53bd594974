//! What the labels of a namespace ask for: a level and a version for each of the three modes.

use std::fmt;

use skiff_meta::field;

pub const LABEL_PREFIX: &str = "pod-security.kubernetes.io/";

/// From the weakest to the strictest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Privileged,
    Baseline,
    Restricted,
}

impl Level {
    pub fn read(text: &str) -> Option<Level> {
        match text {
            "privileged" => Some(Level::Privileged),
            "baseline" => Some(Level::Baseline),
            "restricted" => Some(Level::Restricted),
            _ => None,
        }
    }
}

/// The minor version of Kubernetes whose policy counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    Latest,
    Minor(u64),
}

impl Version {
    pub fn read(text: &str) -> Option<Version> {
        if text == "latest" {
            return Some(Version::Latest);
        }
        let digits = text.strip_prefix("v1.")?;
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        if !plain || (digits.len() > 1 && digits.starts_with('0')) {
            return None;
        }
        let minor: i64 = digits.parse().ok()?;
        u64::try_from(minor).ok().map(Version::Minor)
    }

    /// Whether what came with a minor version is there.
    pub fn has_reached(self, minor: u64) -> bool {
        match self {
            Version::Latest => true,
            Version::Minor(own) => own >= minor,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LevelVersion {
    pub level: Level,
    pub version: Version,
}

impl LevelVersion {
    const PRIVILEGED: LevelVersion = LevelVersion {
        level: Level::Privileged,
        version: Version::Latest,
    };
}

impl fmt::Display for LevelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Privileged => "privileged",
            Level::Baseline => "baseline",
            Level::Restricted => "restricted",
        };
        match self.version {
            Version::Latest => write!(f, "{level}:latest"),
            Version::Minor(minor) => write!(f, "{level}:v1.{minor}"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    pub enforce: LevelVersion,
    pub audit: LevelVersion,
    pub warn: LevelVersion,
}

impl Policy {
    /// What a namespace without labels has.
    pub const PRIVILEGED: Policy = Policy {
        enforce: LevelVersion::PRIVILEGED,
        audit: LevelVersion::PRIVILEGED,
        warn: LevelVersion::PRIVILEGED,
    };

    pub fn fully_privileged(&self) -> bool {
        [self.enforce, self.audit, self.warn]
            .iter()
            .all(|mode| mode.level == Level::Privileged)
    }

    /// Reads labels. There is always a policy: what cannot be read is enforced as strictly as can be, but neither
    /// audited nor warned about.
    pub fn of_labels<'a>(
        defaults: Policy,
        label: impl Fn(&str) -> Option<&'a str>,
    ) -> (Policy, Vec<field::Error>) {
        let mut errors = Vec::new();
        let mut complain = |key: &str, value: &str, why: &str| {
            let path = field::Path::new("metadata.labels").key(key);
            errors.push(field::Error::invalid(&path, value, why));
        };
        let mut policy = defaults;
        let mut mode = |name: &str, place: &mut LevelVersion, otherwise: Level| {
            let (mut level_is_set, mut version_is_set) = (false, false);
            let mut readable = false;
            let key = format!("{LABEL_PREFIX}{name}");
            if let Some(text) = label(&key) {
                level_is_set = true;
                let read = Level::read(text);
                readable = read.is_some();
                if !readable {
                    complain(&key, text, "must be one of privileged, baseline, restricted");
                }
                place.level = read.unwrap_or(otherwise);
            }
            let key = format!("{LABEL_PREFIX}{name}-version");
            if let Some(text) = label(&key) {
                version_is_set = true;
                let read = Version::read(text);
                if read.is_none() {
                    complain(&key, text, "must be \"latest\" or \"v1.x\"");
                }
                place.version = read.unwrap_or(Version::Latest);
            }
            (level_is_set, version_is_set, readable)
        };
        let (_, _, enforced) = mode("enforce", &mut policy.enforce, Level::Restricted);
        mode("audit", &mut policy.audit, Level::Privileged);
        let (warn_level, warn_version, _) = mode("warn", &mut policy.warn, Level::Privileged);
        // What is enforced on pods is a warning about their controllers.
        if !warn_level && enforced && policy.enforce.level > policy.warn.level {
            policy.warn.level = policy.enforce.level;
            if !warn_version {
                policy.warn.version = policy.enforce.version;
            }
        }
        (policy, errors)
    }
}
