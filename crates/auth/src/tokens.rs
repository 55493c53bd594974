//! Whoever may know a bearer token, in this order: service accounts and their Secrets, a file, bootstrap tokens, identity
//! providers, the webhook. All are asked until one knows it; if none does, all that went wrong is told.

use async_trait::async_trait;

use crate::{AuthError, LegacyTokens, TokenNote, TokenVerifier, UserInfo, audiences_of};

/// Who a token is of, and what it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authenticated {
    pub user: UserInfo,
    /// None: whoever made the token knows of no audiences; it is for the API server.
    pub audiences: Option<Vec<String>>,
}

impl Authenticated {
    pub fn anywhere(user: UserInfo) -> Authenticated {
        Authenticated {
            user,
            audiences: None,
        }
    }
}

#[async_trait]
pub trait TokenAuthenticator: Send + Sync {
    /// `Ok(None)`: it is a token of somebody else. `audiences` are those that the asker accepts, at least one.
    async fn authenticate(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Authenticated>, AuthError>;

    /// Whether it is asked about tokens that are for others than the API server.
    fn knows_audiences(&self) -> bool {
        false
    }
}

#[derive(Default)]
pub struct Tokens {
    pub service_accounts: Option<TokenVerifier>,
    /// Tokens that are in Secrets of service accounts.
    pub legacy: Option<LegacyTokens>,
    pub others: Vec<Box<dyn TokenAuthenticator>>,
    /// What this server calls itself.
    pub audiences: Vec<String>,
}

impl Tokens {
    pub fn is_empty(&self) -> bool {
        self.service_accounts.is_none() && self.legacy.is_none() && self.others.is_empty()
    }

    /// Who the token is of, and for which of `audiences` it is; none: those of the server. What is to be told of its use,
    /// also if it is refused, is added to `notes`.
    pub async fn authenticate(
        &self,
        token: &str,
        audiences: Option<&[String]>,
        notes: &mut Vec<TokenNote>,
    ) -> Result<(UserInfo, Vec<String>), AuthError> {
        let wanted = audiences.unwrap_or(&self.audiences);
        let both = |of: &[String]| -> Vec<String> {
            let both = wanted.iter().filter(|audience| of.contains(audience));
            both.cloned().collect()
        };
        let mut refused = Vec::new();
        if let Some(verifier) = &self.service_accounts {
            match verifier.verify(token, audiences, notes).await {
                Ok(user) => {
                    // COMPAT: who asks for nothing special hears the server's own.
                    let found = match audiences {
                        None => self.audiences.clone(),
                        Some(_) => both(&audiences_of(token)),
                    };
                    return Ok((user, found));
                }
                Err(AuthError::NotOurs) => {}
                Err(error) => refused.push(error),
            }
        }
        let for_others = both(&self.audiences).is_empty() && !wanted.is_empty();
        // Legacy tokens have no audiences: they are for this server.
        if let Some(legacy) = self.legacy.as_ref().filter(|_| !for_others) {
            match legacy.user(token, notes).await {
                Ok(Some(user)) => return Ok((user, both(&self.audiences))),
                Ok(None) => {}
                Err(error) => refused.push(error),
            }
        }
        for other in &self.others {
            if for_others && !other.knows_audiences() {
                continue;
            }
            match other.authenticate(token, wanted).await {
                Ok(Some(found)) => {
                    let audiences = both(found.audiences.as_ref().unwrap_or(&self.audiences));
                    if !audiences.is_empty() || wanted.is_empty() {
                        return Ok((found.user, audiences));
                    }
                }
                Ok(None) => {}
                Err(error) => refused.push(error),
            }
        }
        Err(match refused.len() {
            0 => AuthError::NotOurs,
            1 => refused.swap_remove(0),
            _ => AuthError::Several(refused),
        })
    }
}

impl AuthError {
    /// What a TokenReview says, in upstream's words.
    pub fn told(&self) -> String {
        let mut words = vec!["invalid bearer token".to_owned()];
        self.collect(&mut words);
        match words.as_slice() {
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        }
    }

    fn collect(&self, words: &mut Vec<String>) {
        let text = match self {
            AuthError::Several(errors) => {
                errors.iter().for_each(|error| error.collect(words));
                return;
            }
            AuthError::NotOurs => return,
            AuthError::Audiences { token, target } => {
                // Go prints a list without commas.
                let list = |names: &[String]| {
                    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
                    names.join(" ")
                };
                format!(
                    "token audiences [{}] is invalid for the target audiences [{}]",
                    list(token),
                    list(target)
                )
            }
            AuthError::Signature => "go-jose/go-jose: error in cryptographic primitive".to_owned(),
            AuthError::Told(text) => text.clone(),
            _ => "service account token is not valid".to_owned(),
        };
        if !words.contains(&text) {
            words.push(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Knows the token of its name.
    struct Knows(&'static str, Option<Vec<String>>);

    #[async_trait]
    impl TokenAuthenticator for Knows {
        async fn authenticate(
            &self,
            token: &str,
            _audiences: &[String],
        ) -> Result<Option<Authenticated>, AuthError> {
            if token == "bad" {
                return Err(AuthError::Told(format!("{} says no", self.0)));
            }
            let user = UserInfo::new(self.0, ["g"]);
            let audiences = self.1.clone();
            Ok((token == self.0).then_some(Authenticated { user, audiences }))
        }

        fn knows_audiences(&self) -> bool {
            self.1.is_some()
        }
    }

    #[tokio::test]
    async fn all_are_asked_until_one_knows() {
        let own = vec!["api".to_owned()];
        let other = vec!["vault".to_owned(), "api".to_owned()];
        let tokens = Tokens {
            service_accounts: None,
            legacy: None,
            others: vec![
                Box::new(Knows("a", None)),
                Box::new(Knows("b", Some(other.clone()))),
            ],
            audiences: own.clone(),
        };
        let check =
            async |token: &str, audiences: Option<&[String]>, expected: Result<(&str, &[&str]), &str>| {
                let found = tokens.authenticate(token, audiences, &mut Vec::new()).await;
                let found = found.map_err(|error| error.told());
                let found = found.as_ref().map(|(user, audiences)| {
                    (
                        user.name.as_str(),
                        audiences.iter().map(String::as_str).collect::<Vec<_>>(),
                    )
                });
                let expected = expected.map(|(name, audiences)| (name, audiences.to_vec()));
                assert_eq!(found.map_err(String::as_str), expected, "{token}");
            };
        check("a", None, Ok(("a", &["api"]))).await;
        check("b", None, Ok(("b", &["api"]))).await;
        let vault = &other[..1];
        check("b", Some(vault), Ok(("b", &["vault"]))).await;
        // Who knows of no audiences knows the server's own only.
        check("a", Some(vault), Err("invalid bearer token")).await;
        check("c", None, Err("invalid bearer token")).await;
        check("bad", None, Err("[invalid bearer token, a says no, b says no]")).await;
        check("bad", Some(vault), Err("[invalid bearer token, b says no]")).await;
    }
}
