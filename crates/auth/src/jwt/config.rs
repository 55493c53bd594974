//! The file that says which identity providers are trusted, and who may come without a credential: an
//! AuthenticationConfiguration; and the older flags, which say the same of one provider. What is wrong is told in
//! upstream's words.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use http::Uri;
use serde::Deserialize;
use skiff_meta::field::quote;

use super::claims::{Expression, Mapper, Rule, Source};
use super::keys::Keys;
use super::{JwtAuthenticator, JwtAuthenticators};
use crate::authorization::BadConfiguration;
use skiff_api::errors::Errors;
use skiff_api::node::Node;
use skiff_api::object_meta::domain_prefixed_path;

const API_VERSIONS: [&str; 3] = [
    "apiserver.config.k8s.io/v1",
    "apiserver.config.k8s.io/v1beta1",
    "apiserver.config.k8s.io/v1alpha1",
];
/// All that are built, in the order in which they are told.
const ALGORITHMS: [&str; 8] = [
    "ES256", "ES384", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512",
];
const MOST: usize = 64;
/// How long the providers of a changed file have to become usable, and how often that is looked at.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(100);

/// Whether requests without a credential are let in, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anonymous {
    pub enabled: bool,
    /// Only on these paths; none: on all.
    pub paths: Vec<String>,
}

impl Anonymous {
    pub fn everywhere(enabled: bool) -> Anonymous {
        Anonymous {
            enabled,
            paths: Vec::new(),
        }
    }

    pub fn on(&self, path: &str) -> bool {
        self.enabled && (self.paths.is_empty() || self.paths.iter().any(|known| known == path))
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AuthenticationConfiguration {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    jwt: Vec<Jwt>,
    anonymous: Option<AnonymousConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnonymousConfig {
    #[serde(default)]
    enabled: bool,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    #[serde(default)]
    path: String,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Jwt {
    issuer: Issuer,
    claim_validation_rules: Vec<ClaimRule>,
    claim_mappings: ClaimMappings,
    user_validation_rules: Vec<UserRule>,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Issuer {
    url: String,
    #[serde(rename = "discoveryURL")]
    discovery_url: String,
    certificate_authority: String,
    audiences: Vec<String>,
    audience_match_policy: String,
    egress_selector_type: String,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ClaimRule {
    claim: String,
    required_value: String,
    expression: String,
    message: String,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct UserRule {
    expression: String,
    message: String,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ClaimMappings {
    username: Mapping,
    groups: Mapping,
    uid: Mapping,
    extra: Vec<Extra>,
}

#[derive(Debug, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Mapping {
    claim: String,
    prefix: Option<String>,
    expression: String,
}

#[derive(Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Extra {
    key: String,
    value_expression: String,
}

/// The flags of one provider, as they were given.
#[derive(Debug, Clone, Default)]
pub struct OidcFlags {
    pub issuer_url: String,
    pub client_id: String,
    pub username_claim: String,
    pub username_prefix: String,
    pub groups_claim: String,
    pub groups_prefix: String,
    pub required_claims: BTreeMap<String, String>,
    pub signing_algs: Vec<String>,
    /// PEM.
    pub ca: Option<String>,
}

#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, path: impl AsRef<str>, what: impl AsRef<str>) {
        self.0.push(format!("{}: {}", path.as_ref(), what.as_ref()));
    }

    fn invalid(&mut self, path: impl AsRef<str>, value: &str, why: impl AsRef<str>) {
        self.add(path, format!("Invalid value: {}: {}", quote(value), why.as_ref()));
    }

    fn duplicate(&mut self, path: impl AsRef<str>, value: &str) {
        self.add(path, format!("Duplicate value: {}", quote(value)));
    }

    fn end(self) -> Result<(), BadConfiguration> {
        match self.0.as_slice() {
            [] => Ok(()),
            [one] => Err(BadConfiguration(one.clone())),
            several => Err(BadConfiguration(format!("[{}]", several.join(", ")))),
        }
    }
}

impl OidcFlags {
    pub fn authenticators(self, disallowed: &[String]) -> Result<Vec<JwtAuthenticator>, BadConfiguration> {
        // COMPAT: only an address is a name by itself.
        let prefix = match self.username_prefix.as_str() {
            "" if self.username_claim != "email" => format!("{}#", self.issuer_url),
            "-" => String::new(),
            given => given.to_owned(),
        };
        let mapping = |claim: String, prefix: String| Mapping {
            claim,
            prefix: Some(prefix),
            ..Mapping::default()
        };
        let rules = self
            .required_claims
            .into_iter()
            .map(|(claim, required_value)| ClaimRule {
                claim,
                required_value,
                ..ClaimRule::default()
            });
        let jwt = Jwt {
            issuer: Issuer {
                url: self.issuer_url,
                certificate_authority: self.ca.unwrap_or_default(),
                audiences: vec![self.client_id],
                ..Issuer::default()
            },
            claim_validation_rules: rules.collect(),
            claim_mappings: ClaimMappings {
                username: mapping(self.username_claim, prefix),
                groups: mapping(self.groups_claim, self.groups_prefix),
                ..ClaimMappings::default()
            },
            user_validation_rules: Vec::new(),
        };
        for algorithm in &self.signing_algs {
            if !ALGORITHMS.contains(&algorithm.as_str()) {
                let why = format!("oidc: unsupported signing alg: {}", quote(algorithm));
                return Err(BadConfiguration(why));
            }
        }
        let mut problems = Problems::default();
        let made = jwt.authenticator("jwt[0]", self.signing_algs, disallowed, &mut problems);
        problems.end()?;
        Ok(made.into_iter().collect())
    }
}

impl AuthenticationConfiguration {
    pub fn load(path: &Path) -> Result<AuthenticationConfiguration, BadConfiguration> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| BadConfiguration(format!("{}: {error}", path.display())))?;
        AuthenticationConfiguration::parse(&text)
    }

    pub fn parse(text: &str) -> Result<AuthenticationConfiguration, BadConfiguration> {
        if text.trim().is_empty() {
            return Err(BadConfiguration("empty config data".to_owned()));
        }
        let config: AuthenticationConfiguration =
            serde_saphyr::from_str(text).map_err(|error| BadConfiguration(error.to_string()))?;
        if config.kind != "AuthenticationConfiguration"
            || !API_VERSIONS.contains(&config.api_version.as_str())
        {
            let (kind, version) = (quote(&config.kind), quote(&config.api_version));
            let why = format!("no kind {kind} is registered for version {version}");
            return Err(BadConfiguration(why));
        }
        Ok(config)
    }

    /// Who may come without a credential, if the file says so.
    pub fn anonymous(&self) -> Option<Anonymous> {
        self.anonymous.as_ref().map(|anonymous| Anonymous {
            enabled: anonymous.enabled,
            paths: anonymous
                .conditions
                .iter()
                .map(|condition| condition.path.clone())
                .collect(),
        })
    }

    /// The providers, whose keys are looked for from now on. `disallowed` are this server's own issuers.
    pub fn authenticators(&self, disallowed: &[String]) -> Result<Vec<JwtAuthenticator>, BadConfiguration> {
        let mut problems = Problems::default();
        if self.jwt.len() > MOST {
            let count = self.jwt.len();
            problems.add(
                "jwt",
                format!("Too many: {count}: must have at most {MOST} items"),
            );
            problems.end()?;
            return Ok(Vec::new());
        }
        let mut made = Vec::new();
        let (mut urls, mut discoveries) = (Vec::new(), Vec::new());
        for (at, jwt) in self.jwt.iter().enumerate() {
            let path = format!("jwt[{at}]");
            let algorithms = ALGORITHMS.map(str::to_owned).to_vec();
            made.extend(jwt.authenticator(&path, algorithms, disallowed, &mut problems));
            let (url, discovery) = (&jwt.issuer.url, &jwt.issuer.discovery_url);
            if urls.contains(&url) {
                problems.duplicate(format!("{path}.issuer.url"), url);
            }
            urls.push(url);
            if !discovery.is_empty() && discoveries.contains(&discovery) {
                problems.duplicate(format!("{path}.issuer.discoveryURL"), discovery);
            }
            discoveries.push(discovery);
        }
        if let Some(anonymous) = &self.anonymous
            && !anonymous.enabled
            && !anonymous.conditions.is_empty()
        {
            let why = "Invalid value: enabled should be set to true when conditions are defined";
            problems.add("anonymous.conditions", why);
        }
        problems.end()?;
        Ok(made)
    }
}

impl JwtAuthenticators {
    /// Reads the file again. What is wrong with it, or names a provider that cannot be used, changes nothing; nor does a
    /// file that says something else of those without a credential than it said at the start.
    pub async fn reload(
        &self,
        path: &Path,
        disallowed: &[String],
        anonymous: Option<&Anonymous>,
    ) -> Result<(), BadConfiguration> {
        let config = AuthenticationConfiguration::load(path)?;
        if config.anonymous().as_ref() != anonymous {
            let why = "anonymous: Forbidden: changed from initial configuration file";
            return Err(BadConfiguration(why.to_owned()));
        }
        let list = config.authenticators(disallowed)?;
        let ready = async {
            while !list.iter().all(|of| of.keys.ready()) {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(PATIENCE, ready).await.is_err() {
            let why = "a provider of the new configuration cannot be used";
            return Err(BadConfiguration(why.to_owned()));
        }
        self.replace(list);
        Ok(())
    }
}

impl Jwt {
    fn authenticator(
        &self,
        path: &str,
        algorithms: Vec<String>,
        disallowed: &[String],
        problems: &mut Problems,
    ) -> Option<JwtAuthenticator> {
        let before = problems.0.len();
        self.issuer.check(&format!("{path}.issuer"), disallowed, problems);
        let mut mapper = Mapper::default();
        self.claim_rules(&format!("{path}.claimValidationRules"), &mut mapper, problems);
        self.mappings(&format!("{path}.claimMappings"), &mut mapper, problems);
        self.user_rules(&format!("{path}.userValidationRules"), &mut mapper, problems);
        if problems.0.len() > before {
            return None;
        }
        let some = |text: &'_ str| (!text.is_empty()).then(|| text.to_owned());
        let discovery = some(&self.issuer.discovery_url);
        let ca = some(&self.issuer.certificate_authority);
        match Keys::of(&self.issuer.url, discovery.as_deref(), ca.as_deref()) {
            Ok(keys) => Some(JwtAuthenticator {
                issuer: self.issuer.url.clone(),
                audiences: self.issuer.audiences.clone(),
                algorithms,
                mapper,
                keys,
            }),
            Err(why) => {
                problems.invalid(format!("{path}.issuer.certificateAuthority"), "<omitted>", why);
                None
            }
        }
    }

    fn claim_rules(&self, path: &str, mapper: &mut Mapper, problems: &mut Problems) {
        let mut expressions = Vec::new();
        for (at, rule) in self.claim_validation_rules.iter().enumerate() {
            let path = format!("{path}[{at}]");
            match (rule.claim.as_str(), rule.expression.as_str()) {
                ("", "") => problems.add(path, "Required value: claim or expression is required"),
                (claim, "") => {
                    if !rule.message.is_empty() {
                        let why = "may not be specified when claim is set";
                        problems.invalid(format!("{path}.message"), &rule.message, why);
                    }
                    let value = rule.required_value.clone();
                    if mapper.required.insert(claim.to_owned(), value).is_some() {
                        problems.duplicate(format!("{path}.claim"), claim);
                    }
                }
                ("", expression) => {
                    if !rule.required_value.is_empty() {
                        let why = "may not be specified when expression is set";
                        problems.invalid(format!("{path}.requiredValue"), &rule.required_value, why);
                    }
                    let path = format!("{path}.expression");
                    if expressions.contains(&expression) {
                        problems.duplicate(path, expression);
                        continue;
                    }
                    expressions.push(expression);
                    if let Some(expression) = compiled(path, expression, Expression::of_claims, problems) {
                        let message = rule.message.clone();
                        mapper.of_claims.push(Rule { expression, message });
                    }
                }
                (claim, _) => problems.invalid(path, claim, "claim and expression can't both be set"),
            }
        }
    }

    fn mappings(&self, path: &str, mapper: &mut Mapper, problems: &mut Problems) {
        let mappings = &self.claim_mappings;
        mapper.username = mappings
            .username
            .source(&format!("{path}.username"), true, true, problems);
        mapper.groups = mappings
            .groups
            .source(&format!("{path}.groups"), false, true, problems);
        mapper.uid = mappings
            .uid
            .source(&format!("{path}.uid"), false, false, problems);
        let mut keys = Vec::new();
        for (at, extra) in mappings.extra.iter().enumerate() {
            let path = format!("{path}.extra[{at}]");
            let (key, of_key) = (extra.key.as_str(), format!("{path}.key"));
            let shown = serde_json::json!({"key": key});
            let mut errors = Errors::new();
            domain_prefixed_path(&Node::root(&shown).field("key"), &mut errors);
            for error in errors.into_vec() {
                problems.0.push(format!("{path}.{error}"));
            }
            if key != key.to_lowercase() {
                problems.invalid(&of_key, key, "must be lowercase");
            }
            let domain = key.split_once('/').map_or("", |(domain, _)| domain);
            let reserved =
                |of: &str| domain == of || domain.strip_suffix(of).is_some_and(|start| start.ends_with('.'));
            if reserved("kubernetes.io") || reserved("k8s.io") {
                let why = "k8s.io, kubernetes.io and their subdomains are reserved for Kubernetes use";
                problems.invalid(&of_key, key, why);
            }
            if keys.contains(&key) {
                problems.duplicate(&of_key, key);
                continue;
            }
            keys.push(key);
            let of_value = format!("{path}.valueExpression");
            if extra.value_expression.is_empty() {
                problems.add(of_value, "Required value");
                continue;
            }
            let made = compiled(of_value, &extra.value_expression, Expression::of_claims, problems);
            mapper
                .extra
                .extend(made.map(|expression| (key.to_owned(), expression)));
        }
        let username = mappings.username.expression.as_str();
        let verified = |text: &str| names_claim(text, "email_verified");
        let elsewhere = mappings.extra.iter().map(|extra| &extra.value_expression);
        let elsewhere = elsewhere.chain(self.claim_validation_rules.iter().map(|rule| &rule.expression));
        if names_claim(username, "email")
            && !verified(username)
            && !elsewhere.into_iter().any(|text| verified(text))
        {
            let why = "claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression";
            problems.invalid(format!("{path}.username.expression"), username, why);
        }
    }

    fn user_rules(&self, path: &str, mapper: &mut Mapper, problems: &mut Problems) {
        let mut expressions = Vec::new();
        for (at, rule) in self.user_validation_rules.iter().enumerate() {
            let path = format!("{path}[{at}].expression");
            let source = rule.expression.as_str();
            if source.is_empty() {
                problems.add(path, "Required value");
            } else if expressions.contains(&source) {
                problems.duplicate(path, source);
            } else if let Some(expression) = compiled(path, source, Expression::of_user, problems) {
                let message = rule.message.clone();
                mapper.of_user.push(Rule { expression, message });
            }
            expressions.push(source);
        }
    }
}

fn compiled(
    path: String,
    source: &str,
    compile: fn(&str) -> Result<Expression, String>,
    problems: &mut Problems,
) -> Option<Expression> {
    match compile(source) {
        Ok(expression) => Some(expression),
        Err(why) => {
            problems.invalid(path, source, why);
            None
        }
    }
}

/// Whether an expression selects this claim by name.
fn names_claim(expression: &str, claim: &str) -> bool {
    let part_of_name = |char: char| char.is_alphanumeric() || char == '_';
    ["claims.", "claims.?"].iter().any(|start| {
        let selected = format!("{start}{claim}");
        expression.match_indices(&selected).any(|(at, _)| {
            let rest = &expression[at + selected.len()..];
            !rest.starts_with(part_of_name) && !expression[..at].ends_with(part_of_name)
        })
    })
}

impl Mapping {
    fn source(&self, path: &str, required: bool, prefixed: bool, problems: &mut Problems) -> Source {
        match (self.claim.as_str(), self.expression.as_str()) {
            ("", "") => {
                if required {
                    problems.add(path, "Required value: claim or expression is required");
                }
                Source::Nowhere
            }
            (claim, "") => {
                if self.prefix.is_none() && prefixed {
                    problems.add(
                        format!("{path}.prefix"),
                        "Required value: prefix is required when claim is set. It can be set to an empty string to disable prefixing",
                    );
                }
                Source::Claim {
                    name: claim.to_owned(),
                    prefix: self.prefix.clone().unwrap_or_default(),
                }
            }
            ("", expression) => {
                if let Some(prefix) = &self.prefix {
                    let why = "may not be specified when expression is set";
                    problems.invalid(format!("{path}.prefix"), prefix, why);
                }
                let made = compiled(
                    format!("{path}.expression"),
                    expression,
                    Expression::of_claims,
                    problems,
                );
                made.map_or(Source::Nowhere, Source::Expression)
            }
            _ => {
                problems.invalid(path, "", "claim and expression can't both be set");
                Source::Nowhere
            }
        }
    }
}

impl Issuer {
    fn check(&self, path: &str, disallowed: &[String], problems: &mut Problems) {
        if self.url.is_empty() {
            problems.add(format!("{path}.url"), "Required value");
        } else {
            if disallowed.contains(&self.url) {
                let why = format!(
                    "URL must not overlap with disallowed issuers: [{}]",
                    disallowed.join(" ")
                );
                problems.invalid(format!("{path}.url"), &self.url, why);
            }
            check_url(&format!("{path}.url"), &self.url, problems);
        }
        if !self.discovery_url.is_empty() {
            let of = format!("{path}.discoveryURL");
            if self.url.trim_end_matches('/') == self.discovery_url.trim_end_matches('/') {
                problems.invalid(
                    &of,
                    &self.discovery_url,
                    "discoveryURL must be different from URL",
                );
            }
            check_url(&of, &self.discovery_url, problems);
        }
        let of = format!("{path}.audiences");
        if self.audiences.is_empty() {
            problems.add(&of, format!("Required value: at least one {of} is required"));
        }
        for (at, audience) in self.audiences.iter().enumerate() {
            if audience.is_empty() {
                problems.add(format!("{of}[{at}]"), "Required value");
            }
            if self.audiences[..at].contains(audience) {
                problems.duplicate(format!("{of}[{at}]"), audience);
            }
        }
        let policy = self.audience_match_policy.as_str();
        let of_policy = format!("{path}.audienceMatchPolicy");
        match self.audiences.len() {
            0 => {}
            1 if !policy.is_empty() && policy != "MatchAny" => problems.invalid(
                of_policy,
                policy,
                "audienceMatchPolicy must be empty or MatchAny for single audience",
            ),
            2.. if policy != "MatchAny" => {
                problems.invalid(
                    of_policy,
                    policy,
                    "audienceMatchPolicy must be MatchAny for multiple audiences",
                );
            }
            _ => {}
        }
        if !self.egress_selector_type.is_empty() {
            problems.add(
                format!("{path}.egressSelectorType"),
                "egress selectors are not built",
            );
        }
    }
}

fn check_url(path: &str, url: &str, problems: &mut Problems) {
    let (whole, fragment) = url.split_once('#').unwrap_or((url, ""));
    let parsed: Uri = match whole.parse() {
        Ok(parsed) => parsed,
        Err(error) => {
            problems.invalid(path, url, format!("parse {}: {error}", quote(url)));
            return;
        }
    };
    if parsed.scheme_str() != Some("https") {
        problems.invalid(path, url, "URL scheme must be https");
    }
    if parsed
        .authority()
        .is_some_and(|authority| authority.as_str().contains('@'))
    {
        problems.invalid(path, url, "URL must not contain a username or password");
    }
    if parsed.query().is_some_and(|query| !query.is_empty()) {
        problems.invalid(path, url, "URL must not contain a query");
    }
    if !fragment.is_empty() {
        problems.invalid(path, url, "URL must not contain a fragment");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(jwt: &str) -> Result<usize, String> {
        let head = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";
        let config = AuthenticationConfiguration::parse(&format!("{head}{jwt}")).map_err(|error| error.0)?;
        let list = config
            .authenticators(&["https://own".to_owned()])
            .map_err(|error| error.0)?;
        Ok(list.len())
    }

    fn jwt(issuer: &str, mappings: &str) -> String {
        format!("jwt:\n- issuer: {{{issuer}}}\n  claimMappings: {{{mappings}}}\n")
    }

    #[tokio::test]
    async fn files_are_read_as_upstream_does() {
        let issuer = "url: 'https://127.0.0.1:1', audiences: [a]";
        let username = "username: {claim: sub, prefix: ''}";
        assert_eq!(made("jwt: []"), Ok(0));
        assert_eq!(made(&jwt(issuer, username)), Ok(1));
        let check = |issuer: &str, mappings: &str, expected: &str| {
            assert_eq!(made(&jwt(issuer, mappings)).unwrap_err(), expected);
        };
        check(
            "url: 'http://a?b#c', audiences: [a]",
            username,
            "[jwt[0].issuer.url: Invalid value: \"http://a?b#c\": URL scheme must be https, \
             jwt[0].issuer.url: Invalid value: \"http://a?b#c\": URL must not contain a query, \
             jwt[0].issuer.url: Invalid value: \"http://a?b#c\": URL must not contain a fragment]",
        );
        check(
            "url: 'https://own', audiences: [a]",
            username,
            "jwt[0].issuer.url: Invalid value: \"https://own\": URL must not overlap with disallowed issuers: [https://own]",
        );
        check(
            "url: 'https://a'",
            username,
            "jwt[0].issuer.audiences: Required value: at least one jwt[0].issuer.audiences is required",
        );
        check(
            "url: 'https://a', audiences: [a, b]",
            username,
            "jwt[0].issuer.audienceMatchPolicy: Invalid value: \"\": audienceMatchPolicy must be MatchAny for multiple audiences",
        );
        check(
            issuer,
            "",
            "jwt[0].claimMappings.username: Required value: claim or expression is required",
        );
        check(
            issuer,
            "username: {claim: sub}",
            "jwt[0].claimMappings.username.prefix: Required value: prefix is required when claim is set. It can be set to an empty string to disable prefixing",
        );
        check(
            issuer,
            "username: {expression: claims.email}",
            "jwt[0].claimMappings.username.expression: Invalid value: \"claims.email\": claims.email_verified must be used in claimMappings.username.expression or claimMappings.extra[*].valueExpression or claimValidationRules[*].expression when claims.email is used in claimMappings.username.expression",
        );
        let verified = "username: {expression: 'claims.email_verified ? claims.email : claims.sub'}";
        assert_eq!(made(&jwt(issuer, verified)), Ok(1));
        check(
            issuer,
            "username: {claim: sub, prefix: ''}, extra: [{key: a.k8s.io/x, valueExpression: claims.x}]",
            "jwt[0].claimMappings.extra[0].key: Invalid value: \"a.k8s.io/x\": k8s.io, kubernetes.io and their subdomains are reserved for Kubernetes use",
        );
        assert!(made("jwt: []\nfoo: 1").is_err());
    }

    #[tokio::test]
    async fn flags_say_the_same() {
        let flags = OidcFlags {
            issuer_url: "https://127.0.0.1:1".to_owned(),
            client_id: "a".to_owned(),
            username_claim: "sub".to_owned(),
            signing_algs: vec!["RS256".to_owned()],
            ..OidcFlags::default()
        };
        let prefix = |flags: OidcFlags| {
            let list = flags.authenticators(&[]).map_err(|error| error.0).unwrap();
            match &list[0].mapper.username {
                Source::Claim { prefix, .. } => prefix.clone(),
                _ => panic!("a claim"),
            }
        };
        assert_eq!(prefix(flags.clone()), "https://127.0.0.1:1#");
        let with = |claim: &str, given: &str| OidcFlags {
            username_claim: claim.to_owned(),
            username_prefix: given.to_owned(),
            ..flags.clone()
        };
        assert_eq!(prefix(with("email", "")), "");
        assert_eq!(prefix(with("sub", "-")), "");
        assert_eq!(prefix(with("sub", "x:")), "x:");
        let bad = OidcFlags {
            signing_algs: vec!["HS256".to_owned()],
            ..flags
        };
        assert_eq!(
            bad.authenticators(&[]).map(|_| ()).unwrap_err().0,
            "oidc: unsupported signing alg: \"HS256\""
        );
    }

    #[test]
    fn anonymous_requests_may_have_places() {
        let on = |anonymous: &Anonymous, path: &str, expected: bool| {
            assert_eq!(anonymous.on(path), expected, "{path}")
        };
        on(&Anonymous::everywhere(true), "/x", true);
        on(&Anonymous::everywhere(false), "/x", false);
        let only = Anonymous {
            enabled: true,
            paths: vec!["/livez".to_owned()],
        };
        on(&only, "/livez", true);
        on(&only, "/livez/ping", false);
    }
}
