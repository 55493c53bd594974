//! Image references as users write them: is it one, and which tag is meant without one. Pure.

/// The parts of a reference the kubelet cares for.
#[derive(Debug, PartialEq, Eq)]
pub struct ImageName {
    /// With a registry host, as credentials are looked up: `docker.io/library/busybox`.
    pub repository: String,
    pub tag: Option<String>,
    pub digest: Option<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidImageName {
    #[error("couldn't parse image name {0:?}: invalid reference format")]
    Format(String),
    #[error(
        "couldn't parse image name {0:?}: invalid reference format: repository name ({1}) must be lowercase"
    )]
    Uppercase(String, String),
    #[error("couldn't parse image name {0:?}: repository name must not be longer than 255 characters")]
    TooLong(String),
}

pub fn parse(image: &str) -> Result<ImageName, InvalidImageName> {
    let format = || InvalidImageName::Format(image.to_owned());
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) if is_digest(digest) => (rest, Some(digest.to_owned())),
        Some(_) => return Err(format()),
        None => (image, None),
    };
    let last_slash = rest.rfind('/').map_or(0, |at| at + 1);
    let (name, tag) = match rest[last_slash..].find(':') {
        Some(at) => (&rest[..last_slash + at], Some(&rest[last_slash + at + 1..])),
        None => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err(format());
    }
    let (host, path) = match name.split_once('/') {
        Some((host, path))
            if host == "localhost"
                || host.contains(['.', ':'])
                || host.chars().any(|c| c.is_ascii_uppercase()) =>
        {
            (host, path.to_owned())
        }
        Some(_) => ("docker.io", name.to_owned()),
        None => ("docker.io", format!("library/{name}")),
    };
    if name.is_empty() || path.is_empty() || !is_host(host) {
        return Err(format());
    }
    if !path.split('/').all(is_component) {
        if path.chars().any(|c| c.is_ascii_uppercase())
            && path.to_ascii_lowercase().split('/').all(is_component)
        {
            return Err(InvalidImageName::Uppercase(image.to_owned(), path));
        }
        return Err(format());
    }
    let repository = format!("{host}/{path}");
    if repository.len() > 255 {
        return Err(InvalidImageName::TooLong(image.to_owned()));
    }
    let tag = match (tag, &digest) {
        (Some(tag), _) => Some(tag.to_owned()),
        (None, None) => Some("latest".to_owned()),
        (None, Some(_)) => None,
    };
    Ok(ImageName {
        repository,
        tag,
        digest,
    })
}

/// The image as it is handed to the runtime: what was written, with `:latest` where nothing else is said.
pub fn with_default_tag(image: &str) -> Result<String, InvalidImageName> {
    let name = parse(image)?;
    match (&name.digest, &name.tag) {
        (None, Some(tag)) if !image.ends_with(&format!(":{tag}")) => Ok(format!("{image}:{tag}")),
        _ => Ok(image.to_owned()),
    }
}

fn is_tag(tag: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    tag.len() <= 128 && tag.starts_with(word) && tag.chars().all(|c| word(c) || c == '.' || c == '-')
}

fn is_digest(digest: &str) -> bool {
    match digest.split_once(':') {
        Some((algorithm, hex)) => {
            algorithm.starts_with(|c: char| c.is_ascii_alphabetic())
                && algorithm
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+._-".contains(c))
                && hex.len() >= 32
                && hex.chars().all(|c| c.is_ascii_hexdigit())
        }
        None => false,
    }
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !host.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let name_is_good = match name.strip_prefix('[').and_then(|n| n.strip_suffix(']')) {
        Some(address) => !address.is_empty() && address.chars().all(|c| c.is_ascii_hexdigit() || c == ':'),
        None => name.split('.').all(|part| {
            !part.is_empty()
                && !part.starts_with('-')
                && !part.ends_with('-')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
        }),
    };
    name_is_good && port.is_none_or(|p| !p.is_empty() && p.chars().all(|c| c.is_ascii_digit()))
}

/// Lower-case words joined by `.`, `_`, `__` or any number of dashes.
fn is_component(component: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if !component.starts_with(word) || !component.ends_with(word) {
        return false;
    }
    let mut separator = String::new();
    for c in component.chars() {
        if word(c) {
            if !separator.is_empty()
                && separator != "."
                && separator != "_"
                && separator != "__"
                && separator.chars().any(|s| s != '-')
            {
                return false;
            }
            separator.clear();
        } else if ".-_".contains(c) {
            separator.push(c);
        } else {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_tags() {
        let check =
            |image: &str, expected: &str| assert_eq!(with_default_tag(image).as_deref(), Ok(expected));
        check("busybox", "busybox:latest");
        check("busybox:1.36", "busybox:1.36");
        check("localhost:5000/a/b", "localhost:5000/a/b:latest");
        check("registry.k8s.io/pause:3.10", "registry.k8s.io/pause:3.10");
        let digest = "a@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        check(digest, digest);
    }

    #[test]
    fn repositories() {
        assert_eq!(parse("busybox").unwrap().repository, "docker.io/library/busybox");
        assert_eq!(parse("me/app:1").unwrap().repository, "docker.io/me/app");
        assert_eq!(parse("host:5000/me/app").unwrap().repository, "host:5000/me/app");
    }

    #[test]
    fn refused() {
        for bad in [
            "",
            "a b",
            "a:b c",
            "a@sha256:12",
            "-a",
            "a//b",
            "a..b",
            "a___b",
            "http://x/y",
            "a:-x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert_eq!(
            parse("FOO").unwrap_err().to_string(),
            "couldn't parse image name \"FOO\": invalid reference format: repository name (library/FOO) must be lowercase"
        );
    }
}
