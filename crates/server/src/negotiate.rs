//! Content negotiation: which form the answer takes (`Accept`), and which form the body has
//! (`Content-Type`). It encodes and decodes nothing itself.

pub use skiff_registry::body::Format;

use crate::protobuf;

/// What upstream's routes say they produce; those of lists also say the forms of a watch.
const PRODUCES: [&str; 5] = [
    "application/json",
    "application/yaml",
    protobuf::MEDIA_TYPE,
    "application/json;stream=watch",
    protobuf::STREAM_MEDIA_TYPE,
];
const OF_OBJECTS: usize = 3;

/// What the client wants the object turned into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transform {
    None,
    /// meta.k8s.io Table, in the version asked for.
    Table(String),
    PartialObjectMetadata(String),
    PartialObjectMetadataList(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub format: Format,
    pub pretty: bool,
    pub transform: Transform,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Clause<'a> {
    pub main: &'a str,
    pub sub: &'a str,
    pub params: Vec<(&'a str, &'a str)>,
    quality: f32,
}

impl<'a> Clause<'a> {
    pub fn param(&self, name: &str) -> &'a str {
        self.params
            .iter()
            .find(|(key, _)| *key == name)
            .map_or("", |(_, value)| *value)
    }
}

/// The clauses of an Accept header, best first.
pub fn parse_accept(header: &str) -> Vec<Clause<'_>> {
    let mut clauses: Vec<Clause> = header
        .split(',')
        .filter_map(|text| {
            let mut pieces = text.split(';').map(str::trim);
            let media = pieces.next()?;
            let (main, sub) = match media {
                "" => return None,
                "*" => ("*", "*"),
                media => media.split_once('/')?,
            };
            let mut quality = 1.0;
            let mut params = Vec::new();
            for piece in pieces {
                let Some((key, value)) = piece.split_once('=') else {
                    continue;
                };
                let (key, value) = (key.trim(), value.trim().trim_matches('"'));
                if key == "q" {
                    quality = value.parse().unwrap_or(1.0);
                } else {
                    params.push((key, value));
                }
            }
            Some(Clause {
                main: main.trim(),
                sub: sub.trim(),
                params,
                quality,
            })
        })
        .collect();
    // A stable sort: among equals the client's order is its preference.
    clauses.sort_by(|a, b| {
        b.quality
            .total_cmp(&a.quality)
            .then_with(|| (a.main == "*").cmp(&(b.main == "*")))
            .then_with(|| (a.sub == "*").cmp(&(b.sub == "*")))
    });
    clauses
}

/// COMPAT: upstream's router refuses what no route produces before any finer choice, in words of its own.
/// It looks at whole types only: `application/*` is refused.
pub fn routed(accept: &str, listing: bool) -> Result<(), String> {
    let produces = if listing {
        &PRODUCES[..]
    } else {
        &PRODUCES[..OF_OBJECTS]
    };
    routed_to(accept, produces)
}

pub fn routed_to(accept: &str, produces: &[&str]) -> Result<(), String> {
    let fits = |clause: &str| {
        let media = media_type(clause);
        media == "*/*" || produces.contains(&media)
    };
    if accept.is_empty() || accept.split(',').any(fits) {
        return Ok(());
    }
    Err(format!(
        "406: Not Acceptable\n\nAvailable representations: {}",
        produces.join(", ")
    ))
}

/// What a path can answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    All,
    /// Objects that have no protobuf form, though their metadata has.
    Untyped,
    /// Documents that are not turned into tables or metadata.
    Whole,
}

/// Chooses the answer's form. `Err` carries the message of the 406.
pub fn output(accept: &str, pretty: bool, stream: bool, offer: Offer) -> Result<Output, String> {
    if accept.is_empty() {
        return Ok(Output {
            format: Format::Json,
            pretty,
            transform: Transform::None,
        });
    }
    for clause in parse_accept(accept) {
        let format = match (clause.main, clause.sub) {
            ("*", "*") | ("application", "*" | "json") => Format::Json,
            ("application", "yaml") => Format::Yaml,
            ("application", "vnd.kubernetes.protobuf") => Format::Protobuf,
            _ => continue,
        };
        let stream_param = clause.param("stream");
        if !stream_param.is_empty() && (stream_param != "watch" || format == Format::Yaml) {
            continue;
        }
        let (kind, group, version) = (clause.param("as"), clause.param("g"), clause.param("v"));
        let known_version = matches!(version, "v1" | "v1beta1");
        let transform = match kind {
            _ if offer == Offer::Whole && !kind.is_empty() => continue,
            "" if offer == Offer::Untyped && format == Format::Protobuf => continue,
            "" if group.is_empty() && version.is_empty() => Transform::None,
            // The cells of a table have no type, so it has no protobuf form.
            "Table" if group == "meta.k8s.io" && known_version && format != Format::Protobuf => {
                Transform::Table(version.to_string())
            }
            "PartialObjectMetadata" if group == "meta.k8s.io" && known_version => {
                Transform::PartialObjectMetadata(version.to_string())
            }
            "PartialObjectMetadataList" if group == "meta.k8s.io" && known_version => {
                Transform::PartialObjectMetadataList(version.to_string())
            }
            _ => continue,
        };
        if stream && format == Format::Yaml {
            return Err(only(&PRODUCES[OF_OBJECTS..]));
        }
        return Ok(Output {
            format,
            pretty: pretty || clause.param("pretty") == "1",
            transform,
        });
    }
    Err(not_accepted())
}

/// The message of the 406.
pub fn not_accepted() -> String {
    only(&PRODUCES[..OF_OBJECTS])
}

fn only(supported: &[&str]) -> String {
    format!(
        "only the following media types are accepted: {}",
        supported.join(", ")
    )
}

/// Reads a Content-Type; an absent one means JSON. `Err` carries the message of the 415.
pub fn input(content_type: &str) -> Result<Format, String> {
    match media_type(content_type).to_ascii_lowercase().as_str() {
        "" if content_type.is_empty() => Ok(Format::Json),
        "application/json" => Ok(Format::Json),
        "application/yaml" => Ok(Format::Yaml),
        protobuf::MEDIA_TYPE => Ok(Format::Protobuf),
        _ => Err(format!(
            "the body of the request was in an unknown format - accepted media types include: {}",
            PRODUCES[..OF_OBJECTS].join(", ")
        )),
    }
}

/// The media type without its parameters.
pub fn media_type(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or("").trim()
}

/// Browsers and command-line tools get indented output unless they say otherwise.
pub fn pretty(query_value: Option<&str>, user_agent: &str) -> bool {
    if let Some(value) = query_value.filter(|value| !value.is_empty()) {
        return matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True");
    }
    ["curl", "Wget", "Mozilla/5.0"]
        .iter()
        .any(|prefix| user_agent.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(accept: &str, expected: Result<(Format, Transform), &str>) {
        let got = output(accept, false, false, Offer::All).map(|output| (output.format, output.transform));
        assert_eq!(
            got,
            expected.map_err(|list| format!("only the following media types are accepted: {list}")),
            "{accept}"
        );
    }

    #[test]
    fn accept() {
        check("", Ok((Format::Json, Transform::None)));
        check("*/*", Ok((Format::Json, Transform::None)));
        check("application/yaml", Ok((Format::Yaml, Transform::None)));
        check(
            "application/vnd.kubernetes.protobuf, application/json",
            Ok((Format::Protobuf, Transform::None)),
        );
        check(
            "application/vnd.kubernetes.protobuf;q=0.5, application/json",
            Ok((Format::Json, Transform::None)),
        );
        check(
            "application/vnd.kubernetes.protobuf;stream=watch",
            Ok((Format::Protobuf, Transform::None)),
        );
        let all = "application/json, application/yaml, application/vnd.kubernetes.protobuf";
        check("application/vnd.kubernetes.protobuf;stream=foo", Err(all));
        check(
            "application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io",
            Err(all),
        );
        check(
            "application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,application/json",
            Ok((Format::Json, Transform::None)),
        );
        check(
            "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
            Ok((Format::Protobuf, Transform::PartialObjectMetadata("v1".into()))),
        );
        check(
            "application/json;q=0.5, application/yaml",
            Ok((Format::Yaml, Transform::None)),
        );
        check(
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
            Ok((Format::Json, Transform::Table("v1".into()))),
        );
        check(
            "application/json;as=Frob;v=v1;g=meta.k8s.io, */*",
            Ok((Format::Json, Transform::None)),
        );
        check(
            "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
            Ok((Format::Json, Transform::PartialObjectMetadataList("v1".into()))),
        );
        check(
            "text/html",
            Err("application/json, application/yaml, application/vnd.kubernetes.protobuf"),
        );
    }

    #[test]
    fn streams() {
        let format = |accept| output(accept, false, true, Offer::All).map(|output| output.format);
        assert_eq!(format(protobuf::MEDIA_TYPE), Ok(Format::Protobuf));
        assert_eq!(
            format("application/yaml"),
            Err("only the following media types are accepted: application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch".into())
        );
        assert_eq!(
            format("application/yaml;stream=watch,application/json"),
            Ok(Format::Json)
        );
    }

    #[test]
    fn routes() {
        for fine in [
            "",
            "*/*",
            "application/json;as=Table",
            "text/html, application/yaml",
        ] {
            assert_eq!(routed(fine, false), Ok(()), "{fine}");
        }
        let refused = "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, application/vnd.kubernetes.protobuf";
        for bad in ["application/*", "garbage", "text/html;q=0.5", "application/cbor"] {
            assert_eq!(routed(bad, false), Err(refused.to_string()), "{bad}");
        }
    }
}
