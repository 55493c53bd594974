//! The flags that say who is known and what they may do, and what the server makes of them. The names are upstream's.

use anyhow::{Context, Result, bail};
use clap::{ArgAction, Args};
use skiff_admission::{Chain, Choice};
use skiff_auth::{
    Abac, Anonymous, AuthenticationConfiguration, AuthorizationConfiguration, AuthorizationWebhook,
    JwtAuthenticators, Mode, OidcFlags, TokenFile, TokenWebhook, WebhookOptions,
};
use skiff_server::{Authentication, Server};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

use crate::cli::file;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Authentication, authorization and admission")]
pub struct AccessArgs {
    /// Accept requests without a credential as system:anonymous
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub anonymous_auth: bool,
    /// Audiences of the API server in service account tokens [default: the service account issuer]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub api_audiences: Vec<String>,
    /// Accept bootstrap tokens (Secrets of type bootstrap.kubernetes.io/token)
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub enable_bootstrap_token_auth: bool,
    /// Static token file, one token per line: token,name,uid,"group1,group2"
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub token_auth_file: Option<PathBuf>,
    /// AuthenticationConfiguration: JWT issuers and anonymous requests
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub authentication_config: Option<PathBuf>,
    /// Kubeconfig of the webhook that authenticates bearer tokens
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub authentication_token_webhook_config_file: Option<PathBuf>,
    /// API version of the TokenReview sent to the webhook
    #[arg(long, value_name = "VERSION", value_parser = ["v1", "v1beta1"], default_value = "v1beta1")]
    pub authentication_token_webhook_version: String,
    /// How long to cache responses of the token webhook
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "2m")]
    pub authentication_token_webhook_cache_ttl: Duration,
    /// URL of the OpenID Connect issuer
    #[arg(
        long,
        value_name = "URL",
        requires = "oidc_client_id",
        conflicts_with = "authentication_config"
    )]
    pub oidc_issuer_url: Option<String>,
    /// Client id that its tokens must be issued for
    #[arg(long, value_name = "ID", requires = "oidc_issuer_url")]
    pub oidc_client_id: Option<String>,
    /// JWT claim with the user name
    #[arg(
        long,
        requires = "oidc_issuer_url",
        value_name = "CLAIM",
        default_value = "sub"
    )]
    pub oidc_username_claim: String,
    /// Prefix for user names; - for none [default: the issuer URL, unless the claim is email]
    #[arg(
        long,
        requires = "oidc_issuer_url",
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub oidc_username_prefix: String,
    /// JWT claim with the user's groups
    #[arg(
        long,
        requires = "oidc_issuer_url",
        value_name = "CLAIM",
        default_value = "",
        hide_default_value = true
    )]
    pub oidc_groups_claim: String,
    /// Prefix for group names
    #[arg(
        long,
        requires = "oidc_issuer_url",
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub oidc_groups_prefix: String,
    /// Claims that a token must have, as key=value
    #[arg(long, requires = "oidc_issuer_url", value_name = "CLAIM=VALUE", value_delimiter = ',', value_parser = pair)]
    pub oidc_required_claim: Vec<(String, String)>,
    /// Accepted signature algorithms of its tokens
    #[arg(
        long,
        requires = "oidc_issuer_url",
        value_name = "ALG",
        value_delimiter = ',',
        default_value = "RS256"
    )]
    pub oidc_signing_algs: Vec<String>,
    /// CA of the OpenID Connect issuer [default: the system's trusted CAs]
    #[arg(long, requires = "oidc_issuer_url", value_name = "FILE", value_parser = file)]
    pub oidc_ca_file: Option<PathBuf>,
    /// Authorization modes, in order: Node, RBAC, Webhook, ABAC, AlwaysAllow, AlwaysDeny [default: Node,RBAC]
    #[arg(long, value_name = "MODE", value_delimiter = ',', conflicts_with = "authorization_config",
        value_parser = ["Node", "RBAC", "Webhook", "ABAC", "AlwaysAllow", "AlwaysDeny"], hide_possible_values = true)]
    pub authorization_mode: Vec<String>,
    /// AuthorizationConfiguration: authorizers with several webhooks and CEL match conditions
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub authorization_config: Option<PathBuf>,
    /// Policy file for authorization mode ABAC, one JSON object per line
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub authorization_policy_file: Option<PathBuf>,
    /// Kubeconfig of the webhook for authorization mode Webhook
    #[arg(long, value_name = "FILE", value_parser = file, conflicts_with = "authorization_config")]
    pub authorization_webhook_config_file: Option<PathBuf>,
    /// API version of the SubjectAccessReview sent to the webhook
    #[arg(long, value_name = "VERSION", value_parser = ["v1", "v1beta1"], default_value = "v1beta1")]
    pub authorization_webhook_version: String,
    /// How long to cache 'authorized' responses of the authorization webhook
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "5m")]
    pub authorization_webhook_cache_authorized_ttl: Duration,
    /// How long to cache 'unauthorized' responses of the authorization webhook
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    pub authorization_webhook_cache_unauthorized_ttl: Duration,
    /// Admission plugins to enable besides the default ones
    #[arg(long, value_name = "PLUGIN", value_delimiter = ',')]
    pub enable_admission_plugins: Vec<String>,
    /// Admission plugins to disable
    #[arg(long, value_name = "PLUGIN", value_delimiter = ',')]
    pub disable_admission_plugins: Vec<String>,
    /// AdmissionConfiguration: the levels and exemptions of PodSecurity
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub admission_control_config_file: Option<PathBuf>,
}

/// A duration as Go writes it, not a negative one.
pub fn duration(text: &str) -> Result<Duration, String> {
    let nanoseconds = skiff_meta::duration::parse(text)?;
    let nanoseconds = u64::try_from(nanoseconds).map_err(|_| "it is negative".to_owned())?;
    Ok(Duration::from_nanos(nanoseconds))
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
    let (name, value) = pair.ok_or("it is not CLAIM=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// How often the files of configuration are looked at, as upstream does at the latest.
const LOOK: Duration = Duration::from_secs(60);

impl AccessArgs {
    /// `issuer` is that of service accounts, which nobody else may be.
    pub fn authentication(&self, issuer: &str) -> Result<Authentication> {
        let webhook = match &self.authentication_token_webhook_config_file {
            None => None,
            Some(path) => {
                let version = &self.authentication_token_webhook_version;
                let ttl = self.authentication_token_webhook_cache_ttl;
                let loaded = TokenWebhook::load(path, version, ttl);
                Some(loaded.context("--authentication-token-webhook-config-file")?)
            }
        };
        let token_file = match &self.token_auth_file {
            None => None,
            Some(path) => {
                let context = || format!("--token-auth-file {}", path.display());
                Some(TokenFile::load(path).with_context(context)?)
            }
        };
        let disallowed = [issuer.to_owned()];
        // COMPAT: who may do everything is at least known, unless a file of configuration says otherwise.
        let open = self.authorization_mode.iter().any(|mode| mode == "AlwaysAllow");
        if self.anonymous_auth && open {
            tracing::warn!(
                "requests without a credential are refused: the authorization mode is AlwaysAllow"
            );
        }
        let mut anonymous = Anonymous::everywhere(self.anonymous_auth && !open);
        let mut jwt = None;
        if let Some(path) = &self.authentication_config {
            let context = || format!("--authentication-config {}", path.display());
            let config = AuthenticationConfiguration::load(path).with_context(context)?;
            if let Some(of_file) = config.anonymous() {
                if !self.anonymous_auth {
                    bail!(
                        "--anonymous-auth flag cannot be set when anonymous field is configured in authentication configuration file"
                    );
                }
                anonymous = of_file;
            }
            jwt = Some(config.authenticators(&disallowed).with_context(context)?);
        } else if let Some(url) = &self.oidc_issuer_url {
            let ca = self.oidc_ca_file.as_ref().map(std::fs::read_to_string);
            let flags = OidcFlags {
                issuer_url: url.clone(),
                client_id: self.oidc_client_id.clone().unwrap_or_default(),
                username_claim: self.oidc_username_claim.clone(),
                username_prefix: self.oidc_username_prefix.clone(),
                groups_claim: self.oidc_groups_claim.clone(),
                groups_prefix: self.oidc_groups_prefix.clone(),
                required_claims: self.oidc_required_claim.iter().cloned().collect(),
                signing_algs: self.oidc_signing_algs.clone(),
                ca: ca.transpose().context("--oidc-ca-file")?,
            };
            jwt = Some(flags.authenticators(&disallowed).context("--oidc-*")?);
        }
        Ok(Authentication {
            anonymous,
            token_file,
            bootstrap_tokens: self.enable_bootstrap_token_auth,
            jwt: jwt.map(|list| Arc::new(JwtAuthenticators::new(list))),
            webhook,
        })
    }

    pub fn authorization(&self) -> Result<Vec<Mode>> {
        let abac = self.abac()?;
        if let Some(path) = &self.authorization_config {
            let modes = AuthorizationConfiguration::load(path, abac);
            return modes.with_context(|| format!("--authorization-config {}", path.display()));
        }
        let mut modes: Vec<Mode> = Vec::new();
        let named: Vec<&str> = self.authorization_mode.iter().map(String::as_str).collect();
        if named.is_empty() {
            modes.extend([Mode::Node, Mode::Rbac]);
        }
        for (at, name) in named.iter().enumerate() {
            if named[..at].contains(name) {
                bail!("authorization-mode {named:?} has mode specified more than once");
            }
            modes.push(match *name {
                "Node" => Mode::Node,
                "RBAC" => Mode::Rbac,
                "AlwaysAllow" => Mode::AlwaysAllow,
                "AlwaysDeny" => Mode::AlwaysDeny,
                "ABAC" => {
                    let policy = abac.clone();
                    Mode::Abac(
                        policy.context("authorization-mode ABAC's authorization policy file not passed")?,
                    )
                }
                _ => Mode::Webhook(Arc::new(self.webhook()?)),
            });
        }
        let has = |name: &str| named.contains(&name) || self.authorization_config.is_some();
        if self.authorization_policy_file.is_some() && !has("ABAC") {
            bail!("cannot specify --authorization-policy-file without mode ABAC");
        }
        if self.authorization_webhook_config_file.is_some() && !has("Webhook") {
            bail!("cannot specify --authorization-webhook-config-file without mode Webhook");
        }
        Ok(modes)
    }

    fn abac(&self) -> Result<Option<Arc<Abac>>> {
        let Some(path) = &self.authorization_policy_file else {
            return Ok(None);
        };
        let context = || format!("--authorization-policy-file {}", path.display());
        let text = std::fs::read_to_string(path).with_context(context)?;
        Ok(Some(Arc::new(Abac::parse(&text).with_context(context)?)))
    }

    fn webhook(&self) -> Result<AuthorizationWebhook> {
        let path = self.authorization_webhook_config_file.as_deref();
        let path = path.context("authorization-mode Webhook's authorization config file not passed")?;
        let options = WebhookOptions {
            version: self.authorization_webhook_version.clone(),
            authorized_ttl: self.authorization_webhook_cache_authorized_ttl,
            unauthorized_ttl: self.authorization_webhook_cache_unauthorized_ttl,
            ..WebhookOptions::default()
        };
        AuthorizationWebhook::load(path, options).context("--authorization-webhook-config-file")
    }

    pub fn admission(&self) -> Result<Chain> {
        let pod_security = match &self.admission_control_config_file {
            None => None,
            Some(path) => {
                let read = |path: &Path| {
                    std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
                };
                let folder = path.parent().unwrap_or(Path::new("."));
                let text = read(path).map_err(anyhow::Error::msg)?;
                let found =
                    skiff_admission::pod_security_configuration(&text, |other| read(&folder.join(other)));
                found
                    .map_err(anyhow::Error::msg)
                    .with_context(|| format!("--admission-control-config-file {}", path.display()))?
            }
        };
        Chain::chosen(Choice {
            enabled: self.enable_admission_plugins.clone(),
            disabled: self.disable_admission_plugins.clone(),
            pod_security,
        })
        .map_err(anyhow::Error::msg)
    }

    /// Takes over what changes in the files of configuration, for as long as the server runs. What is wrong in them
    /// changes nothing.
    pub fn follow(
        &self,
        server: &Server,
        jwt: Option<Arc<JwtAuthenticators>>,
        issuer: &str,
        shutdown: &CancellationToken,
    ) -> Result<()> {
        if let (Some(path), Some(jwt)) = (&self.authentication_config, jwt) {
            let disallowed = vec![issuer.to_owned()];
            let taken = path.clone();
            let anonymous = AuthenticationConfiguration::load(path)?.anonymous();
            on_change(path, shutdown, move || {
                let (jwt, taken, disallowed) = (jwt.clone(), taken.clone(), disallowed.clone());
                let anonymous = anonymous.clone();
                async move { jwt.reload(&taken, &disallowed, anonymous.as_ref()).await }
            });
        }
        if let Some(path) = &self.authorization_config {
            let (server, abac, taken) = (server.clone(), self.abac()?, path.clone());
            on_change(path, shutdown, move || {
                let modes = AuthorizationConfiguration::load(&taken, abac.clone());
                let taken = modes.and_then(|modes| server.change_authorization(modes));
                std::future::ready(taken)
            });
        }
        Ok(())
    }
}

fn on_change<F>(path: &Path, shutdown: &CancellationToken, take: impl Fn() -> F + Send + Sync + 'static)
where
    F: Future<Output = Result<(), skiff_auth::BadConfiguration>> + Send + 'static,
{
    let path = path.to_owned();
    // The configuration that is in force.
    let known = Arc::new(tokio::sync::Mutex::new(std::fs::read(&path).ok()));
    let take = Arc::new(take);
    skiff_supervise::keep("configuration-reload", shutdown, move || {
        let (path, known, take) = (path.clone(), known.clone(), take.clone());
        async move { follow(&path, &mut *known.lock().await, &*take).await }
    });
}

async fn follow<F>(path: &Path, known: &mut Option<Vec<u8>>, take: &(impl Fn() -> F + Send + Sync))
where
    F: Future<Output = Result<(), skiff_auth::BadConfiguration>> + Send,
{
    loop {
        tokio::time::sleep(LOOK).await;
        let now = tokio::fs::read(path).await.ok();
        if now == *known {
            continue;
        }
        // What fails is tried again: a provider may come back, and a file be mended.
        match take().await {
            Ok(()) => {
                *known = now;
                tracing::info!(path = %path.display(), "the new configuration is in use");
            }
            Err(why) => {
                tracing::error!(%why, path = %path.display(), "the new configuration is invalid and not used")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn modes(flags: &[&str]) -> Result<String, String> {
        let all = ["skiff", "server"].iter().chain(flags).copied();
        let cli = Cli::try_parse_from(all).map_err(|error| error.to_string())?;
        let Command::Server(args) = cli.command else {
            panic!("server")
        };
        let modes = args
            .access
            .authorization()
            .map_err(|error| format!("{error:#}"))?;
        Ok(modes.len().to_string())
    }

    #[test]
    fn modes_are_a_list() {
        assert_eq!(modes(&[]).as_deref(), Ok("2"));
        assert_eq!(
            modes(&["--authorization-mode", "Node,RBAC,AlwaysDeny"]).as_deref(),
            Ok("3")
        );
        let refused = |flags: &[&str], why: &str| {
            let error = modes(flags).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        refused(&["--authorization-mode", "Foo"], "invalid value 'Foo'");
        refused(&["--authorization-mode", "RBAC,RBAC"], "more than once");
        refused(&["--authorization-mode", "Webhook"], "config file not passed");
        refused(&["--authorization-mode", "ABAC"], "policy file not passed");
        refused(
            &[
                "--authorization-mode",
                "RBAC",
                "--authorization-webhook-config-file",
                "x",
            ],
            "without mode Webhook",
        );
        refused(
            &["--authorization-mode", "RBAC", "--authorization-config", "x"],
            "cannot be used with",
        );
        refused(&["--oidc-issuer-url", "https://a"], "--oidc-client-id");
        refused(&["--oidc-required-claim", "x"], "CLAIM=VALUE");
        refused(&["--oidc-required-claim", "a=b"], "--oidc-issuer-url");
        refused(&["--oidc-signing-algs", "ES256"], "--oidc-issuer-url");
    }

    #[test]
    fn who_may_do_everything_is_known() {
        let open = |flags: &[&str]| {
            let all = ["skiff", "server"].iter().chain(flags).copied();
            match Cli::try_parse_from(all).unwrap().command {
                Command::Server(args) => args.access.authentication("https://a").unwrap().anonymous.enabled,
                _ => panic!("server"),
            }
        };
        assert!(open(&[]));
        assert!(!open(&["--authorization-mode", "RBAC,AlwaysAllow"]));
        assert!(!open(&["--anonymous-auth=false"]));
    }

    #[test]
    fn flags_may_be_set_to_false() {
        let parse = |flag: &str| match Cli::try_parse_from(["skiff", "server", flag]).unwrap().command {
            Command::Server(args) => args.access.anonymous_auth,
            _ => panic!("server"),
        };
        assert!(!parse("--anonymous-auth=false"));
        assert!(parse("--anonymous-auth"));
    }
}
