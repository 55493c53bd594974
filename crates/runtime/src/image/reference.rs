//! Names of images, from text to registry, repository, tag and digest. It asks nobody whether they exist.

const DEFAULT_REGISTRY: &str = "docker.io";
/// Another name of the same.
const OLD_REGISTRY: &str = "index.docker.io";
const DEFAULT_TAG: &str = "latest";
const LONGEST_NAME: usize = 255;
const LONGEST_TAG: usize = 128;

/// The parts of an image's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<String>,
}

impl Reference {
    pub fn registry(&self) -> &str {
        &self.registry
    }

    pub fn repository(&self) -> &str {
        &self.repository
    }

    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }
}

/// `[registry/]repository[:tag][@digest]`.
pub fn parse(text: &str) -> Result<Reference, &'static str> {
    const INVALID: &str = "invalid reference format";
    if text.is_empty() {
        return Err("repository name must have at least one component");
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    // A colon before the last slash is that of the registry's port.
    let last = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match rest[last..].split_once(':') {
        Some((name, tag)) => (&rest[..last + name.len()], Some(tag)),
        None => (rest, None),
    };
    let (first, others) = match name.split_once('/') {
        Some((first, others)) => (first, Some(others)),
        None => (name, None),
    };
    let first_is_fine = is_component(first) || (others.is_some() && is_registry(first));
    if !first_is_fine
        || !others.is_none_or(|others| others.split('/').all(is_component))
        || !tag.is_none_or(is_tag)
        || !digest.is_none_or(has_form_of_digest)
    {
        return Err(INVALID);
    }
    let (registry, repository) = match others {
        Some(others) if first.contains(['.', ':']) || first == "localhost" => (first, others),
        _ => (DEFAULT_REGISTRY, name),
    };
    let registry = if registry == OLD_REGISTRY {
        DEFAULT_REGISTRY
    } else {
        registry
    };
    let repository = if registry == DEFAULT_REGISTRY && !repository.contains('/') {
        format!("library/{repository}")
    } else {
        repository.to_owned()
    };
    if repository.len() > LONGEST_NAME {
        return Err("repository name must not be more than 255 characters");
    }
    if let Some(digest) = digest {
        check_digest(digest)?;
    }
    let tag = tag.or(digest.is_none().then_some(DEFAULT_TAG));
    Ok(Reference {
        registry: registry.to_owned(),
        repository,
        tag: tag.map(str::to_owned),
        digest: digest.map(str::to_owned),
    })
}

/// `[a-z0-9]+` parts, between them one dot, one or two underscores, or hyphens.
fn is_component(text: &str) -> bool {
    let alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    if !bytes.first().is_some_and(alphanumeric) || !bytes.last().is_some_and(alphanumeric) {
        return false;
    }
    let between = bytes.split(alphanumeric).filter(|between| !between.is_empty());
    between
        .into_iter()
        .all(|between| matches!(between, b"." | b"_" | b"__") || between.iter().all(|byte| *byte == b'-'))
}

/// Host name and perhaps a port.
fn is_registry(text: &str) -> bool {
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
            && bytes
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
    };
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    host.split('.').all(is_label) && port.is_none_or(is_port)
}

fn is_tag(text: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= LONGEST_TAG
        && text.bytes().next().is_some_and(word)
        && text.bytes().all(|byte| word(byte) || matches!(byte, b'.' | b'-'))
}

fn has_form_of_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else {
        return false;
    };
    let is_part = |part: &str| {
        part.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    algorithm.split(['-', '_', '+', '.']).all(is_part)
        && hex.len() >= 32
        && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn check_digest(digest: &str) -> Result<(), &'static str> {
    let (algorithm, hex) = digest.split_once(':').unwrap_or((digest, ""));
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return Err("unsupported digest algorithm"),
    };
    if hex.len() == length {
        Ok(())
    } else {
        Err("invalid checksum digest length")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library is the measure.
    fn check(text: &str) {
        let theirs = text
            .parse::<oci_spec::distribution::Reference>()
            .map(|theirs| Reference {
                registry: theirs.registry().to_owned(),
                repository: theirs.repository().to_owned(),
                tag: theirs.tag().map(str::to_owned),
                digest: theirs.digest().map(str::to_owned),
            })
            .map_err(|error| error.to_string());
        assert_eq!(parse(text).map_err(str::to_owned), theirs, "{text:?}");
    }

    #[test]
    fn references_are_read_as_the_library_reads_them() {
        let hex = "f".repeat(64);
        for name in [
            "",
            "busybox",
            "busybox/",
            "/busybox",
            "a//b",
            "test.com",
            "test.com/repo",
            "test:5000/repo",
            "test:/repo",
            "test:x/repo",
            "localhost/repo",
            "localhost:1/a/b/c",
            "index.docker.io/busybox",
            "docker.io/busybox",
            "docker.io/library/busybox",
            "Upper/case",
            "Upper.com/case",
            "upper.com/Case",
            "UPPER",
            "sub-dom1.foo.com/bar/baz/quux",
            "xn--n3h.com/myimage",
            "-bad.com/repo",
            "bad-.com/repo",
            "a..b/repo",
            "foo_bar.com",
            "foo_bar/baz",
            "foo__bar/baz",
            "foo___bar/baz",
            "foo._bar",
            "foo-----bar",
            "foo-",
            "-foo",
            "foo.",
            "föö",
            "a b",
        ] {
            check(name);
            for tag in [
                "tag",
                "Tag_1.0-x",
                "",
                "-x",
                ".x",
                "_x",
                "a:b",
                "a/b",
                &"t".repeat(128),
                &"t".repeat(129),
            ] {
                check(&format!("{name}:{tag}"));
            }
            for digest in [
                format!("sha256:{hex}"),
                format!("sha256:{}", &hex[1..]),
                format!("sha512:{hex}{hex}"),
                format!("sha384:{hex}"),
                format!("other:{hex}"),
                format!("a+b.c:{hex}"),
                format!("1a:{hex}"),
                format!("sha256:{}g", &hex[1..]),
                "sha256:ff".to_owned(),
                "sha256".to_owned(),
                String::new(),
                format!("sha256:{hex}@x"),
            ] {
                check(&format!("{name}@{digest}"));
                check(&format!("{name}:v1@{digest}"));
            }
        }
        check(&"a".repeat(255));
        check(&"a".repeat(247));
        check(&"a".repeat(248));
        check(&format!("r.io/{}", "a".repeat(255)));
        check(&format!("r.io/{}", "a".repeat(256)));
    }
}
