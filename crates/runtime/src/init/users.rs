//! Looks up users and groups in the container's own /etc/passwd and /etc/group. The C library's lookups
//! are not used: they would load the image's name service modules into this privileged process.

use super::InitError;
use super::spec::UserSpec;

/// COMPAT: containerd's limit, and Kubernetes'.
const MAX_ID: u32 = i32::MAX as u32;

#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
}

/// `passwd` and `group` are the files' contents, empty where the image has none.
pub fn resolve(spec: &UserSpec, passwd: &str, group: &str) -> Result<Identity, InitError> {
    let wanted = if spec.user.is_empty() {
        "0"
    } else {
        spec.user.as_str()
    };
    let number = wanted.parse::<u32>().ok();
    let entry = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, ..] = fields.as_slice() else {
            return None;
        };
        let uid: u32 = uid.parse().ok()?;
        let matches = match number {
            Some(number) => number == uid,
            None => *name == wanted,
        };
        matches.then(|| {
            (
                name.to_string(),
                uid,
                gid.parse::<u32>().unwrap_or(0),
                home.to_string(),
            )
        })
    });
    let (name, uid, own_gid, home) = match (entry, number) {
        (Some(entry), _) => entry,
        (None, Some(number)) => (String::new(), number, 0, "/".to_owned()),
        (None, None) => {
            return Err(InitError::Message(format!(
                "unable to find user {wanted}: no matching entries in passwd file"
            )));
        }
    };
    let gid = if spec.group.is_empty() {
        own_gid
    } else {
        find_group(&spec.group, group).ok_or_else(|| {
            InitError::Message(format!(
                "unable to find group {}: no matching entries in group file",
                spec.group
            ))
        })?
    };
    let mut groups = vec![gid];
    if !spec.strict_groups && !name.is_empty() {
        groups.extend(group.lines().filter_map(|line| {
            let mut fields = line.split(':').skip(2);
            let gid = fields.next()?.parse::<u32>().ok()?;
            fields
                .next()?
                .split(',')
                .any(|member| member == name)
                .then_some(gid)
        }));
    }
    groups.extend(&spec.supplemental_groups);
    groups.sort_unstable();
    groups.dedup();
    // The highest number means "leave it as it is" to the kernel: the container would stay root.
    if uid > MAX_ID || groups.iter().any(|group| *group > MAX_ID) {
        return Err(InitError::Message(format!(
            "uids and gids must be in range 0-{MAX_ID}"
        )));
    }
    Ok(Identity {
        uid,
        gid,
        groups,
        home,
    })
}

fn find_group(wanted: &str, group: &str) -> Option<u32> {
    if let Ok(number) = wanted.parse() {
        return Some(number);
    }
    group.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next()? != wanted {
            return None;
        }
        fields.nth(1)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nweb:x:101:102:w:/srv:/bin/false\n";
    const GROUP: &str = "root:x:0:\nwww:x:102:\nlog:x:7:web,other\n";

    #[test]
    fn resolves() {
        let check = |user: &str,
                     group: &str,
                     extra: &[u32],
                     strict: bool,
                     expected: Option<(u32, u32, &[u32], &str)>| {
            let spec = UserSpec {
                user: user.into(),
                group: group.into(),
                supplemental_groups: extra.to_vec(),
                strict_groups: strict,
            };
            let got = resolve(&spec, PASSWD, GROUP).ok();
            let expected = expected.map(|(uid, gid, groups, home)| Identity {
                uid,
                gid,
                groups: groups.to_vec(),
                home: home.into(),
            });
            assert_eq!(got, expected, "{user}:{group}");
        };
        check("", "", &[], false, Some((0, 0, &[0], "/root")));
        check("web", "", &[], false, Some((101, 102, &[7, 102], "/srv")));
        check("101", "", &[9], false, Some((101, 102, &[7, 9, 102], "/srv")));
        check("101", "", &[9], true, Some((101, 102, &[9, 102], "/srv")));
        check("web", "log", &[], false, Some((101, 7, &[7], "/srv")));
        check("5000", "", &[], false, Some((5000, 0, &[0], "/")));
        check("5000", "600", &[], false, Some((5000, 600, &[600], "/")));
        check("nobody", "", &[], false, None);
        check("web", "nogroup", &[], false, None);
        check("2147483647", "", &[], false, Some((2_147_483_647, 0, &[0], "/")));
        for number in ["2147483648", "4294967295", "4294967296", "-1"] {
            check(number, "", &[], false, None);
            check("0", number, &[], false, None);
        }
        check("0", "", &[u32::MAX], false, None);
    }
}
