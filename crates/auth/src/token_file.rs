//! Tokens that an administrator wrote into a file, one a line: token, name, uid and, in quotes, groups. It is read once.

use std::collections::HashMap;
use std::path::Path;

use async_trait::async_trait;

use crate::expiring::{Key, key};
use crate::{AuthError, Authenticated, TokenAuthenticator, UserInfo};

#[derive(Debug, thiserror::Error)]
pub enum BadTokenFile {
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    #[error("must have at least 3 columns (token, user name, user uid), found {0}")]
    Columns(usize),
    #[error("record {0}: a quote is not where it may be")]
    Quote(usize),
}

/// By the digest of the token: how long a look-up takes tells nothing about the tokens that there are.
#[derive(Debug)]
pub struct TokenFile(HashMap<Key, UserInfo>);

impl TokenFile {
    pub fn load(path: &Path) -> Result<TokenFile, BadTokenFile> {
        TokenFile::parse(&std::fs::read_to_string(path)?)
    }

    fn parse(text: &str) -> Result<TokenFile, BadTokenFile> {
        let mut users = HashMap::new();
        for (number, record) in records(text)?.into_iter().enumerate() {
            let [token, name, uid, more @ ..] = record.as_slice() else {
                return Err(BadTokenFile::Columns(record.len()));
            };
            let number = number + 1;
            if token.is_empty() {
                tracing::warn!(number, "a record of the token file has no token");
                continue;
            }
            let groups = more.first().map_or("", String::as_str).split(',');
            let mut user = UserInfo::new(name, groups.filter(|group| !group.is_empty()));
            user.uid.clone_from(uid);
            if users.insert(key(&[token.as_bytes()]), user).is_some() {
                tracing::warn!(number, "a token is in the token file twice: the last counts");
            }
        }
        Ok(TokenFile(users))
    }
}

#[async_trait]
impl TokenAuthenticator for TokenFile {
    async fn authenticate(
        &self,
        token: &str,
        _audiences: &[String],
    ) -> Result<Option<Authenticated>, AuthError> {
        let user = self.0.get(&key(&[token.as_bytes()]));
        Ok(user.cloned().map(Authenticated::anywhere))
    }
}

/// Lines of fields between commas. A field in quotes may have commas, line ends, and quotes that are doubled.
fn records(text: &str) -> Result<Vec<Vec<String>>, BadTokenFile> {
    let mut records: Vec<Vec<String>> = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('\n').or_else(|| rest.strip_prefix("\r\n")) {
            rest = after;
            continue;
        }
        let mut record = Vec::new();
        loop {
            let (field, after) = field(rest).ok_or(BadTokenFile::Quote(records.len() + 1))?;
            record.push(field);
            match after.strip_prefix(',') {
                Some(after) => rest = after,
                None => {
                    rest = after;
                    break;
                }
            }
        }
        records.push(record);
    }
    Ok(records)
}

/// The first field, and what follows it: a comma, the end of a line, or nothing.
fn field(text: &str) -> Option<(String, &str)> {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find([',', '\n']).unwrap_or(text.len());
        let (field, rest) = text.split_at(end);
        let field = match rest.starts_with(',') {
            true => field,
            false => field.strip_suffix('\r').unwrap_or(field),
        };
        return (!field.contains('"')).then(|| (field.to_owned(), rest));
    };
    let mut field = String::new();
    loop {
        let (part, after) = rest.split_once('"')?;
        field.push_str(part);
        match after.strip_prefix('"') {
            Some(after) => {
                field.push('"');
                rest = after;
            }
            None => {
                let after = after.strip_prefix('\r').unwrap_or(after);
                let ends = after.is_empty() || after.starts_with([',', '\n']);
                return ends.then_some((field, after));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn tokens_name_users() {
        let file = "t1,jane,u1,\"devs,ops\"\r\n\nt2,\"a \"\"b\"\"\",\n,nobody,u3\nt1,joe,u4,one\n";
        let tokens = TokenFile::parse(file).unwrap();
        let check = async |token: &str, expected: Option<(&str, &str, &[&str])>| {
            let found = tokens.authenticate(token, &[]).await.unwrap();
            let user = found.map(|found| found.user);
            let found = user.as_ref().map(|user| {
                let groups: Vec<&str> = user.groups.iter().map(String::as_str).collect();
                (user.name.as_str(), user.uid.as_str(), groups)
            });
            let expected = expected.map(|(name, uid, groups)| (name, uid, groups.to_vec()));
            assert_eq!(found, expected, "{token}");
        };
        // The last of two counts.
        check("t1", Some(("joe", "u4", &["one", "system:authenticated"]))).await;
        check("t2", Some(("a \"b\"", "", &["system:authenticated"]))).await;
        check("", None).await;
        check("t3", None).await;
        let both = TokenFile::parse("t,jane,u1,\"devs,ops\"").unwrap();
        let user = both.authenticate("t", &[]).await.unwrap().unwrap().user;
        assert_eq!(user.groups, ["devs", "ops", "system:authenticated"]);
    }

    #[test]
    fn what_is_wrong_is_told() {
        let check = |file: &str, why: &str| {
            assert_eq!(TokenFile::parse(file).unwrap_err().to_string(), why, "{file}");
        };
        check(
            "t,jane\n",
            "must have at least 3 columns (token, user name, user uid), found 2",
        );
        for quote in ["t,\"jane,u", "t,ja\"ne,u", "t,\"jane\"x,u"] {
            check(quote, "record 1: a quote is not where it may be");
        }
    }
}
