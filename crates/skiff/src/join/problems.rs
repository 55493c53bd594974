//! Every way in which a join can fail that has a known cause, in a sentence that says what to do.

use jiff::Timestamp;
use skiff_client::{ConnectError, ServerAddress};
use std::io::ErrorKind;
use thiserror::Error;

/// A clock that is further away makes certificates useless: signers backdate them by five minutes.
const CLOCK_TOLERANCE_SECONDS: i64 = 5 * 60;
/// An API server may be so many minor versions older than another one, as upstream's skew policy says.
pub const OLDER_SERVER_MINORS: u32 = 1;
/// A kubelet may be so many minor versions older than the API server.
pub const OLDER_MINORS: u32 = 3;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Problem {
    #[error(
        "{0}: nothing listens there (connection refused); look whether the cluster runs (`skiff status`) and whether address and port are right"
    )]
    Refused(String),
    #[error("{0}: no answer; a firewall may drop the packets: open the port on the server for this machine")]
    Silent(String),
    #[error(
        "{0}: there is no way to this address ({1}); look at this machine's network, and at the name if it is one"
    )]
    Unreachable(String, String),
    #[error(
        "{0}: what listens there does not speak TLS ({1}); write the address of the API server, as `skiff token create` prints it"
    )]
    NotTls(String, String),
    #[error(
        "the certificate of {0} is not valid for that name or address; use the address that `skiff token create` prints"
    )]
    OtherName(String),
    #[error(
        "the certificate of {0} is not signed by the cluster's authority; something between here and the cluster answers in its place"
    )]
    OtherSigner(String),
    #[error(
        "the certificate of {0} is not valid now by the clock of this machine, which says {1}; set the clock, here or there"
    )]
    NotValidNow(String, Timestamp),
    #[error(
        "the token is unknown to the cluster, or has expired; make a new one there with `skiff token create`"
    )]
    UnknownToken,
    #[error(
        "the token is wrong: the cluster knows its first part, but not the second; copy the whole line that `skiff token create` printed"
    )]
    WrongToken,
    #[error(
        "the cluster's authority is {found}, not {expected}; this is another cluster than the one the hash is of, or somebody pretends to be it"
    )]
    OtherAuthority { found: String, expected: String },
    #[error(
        "the clock of this machine is {0} {1} the server's; set it (`timedatectl set-ntp true`) and try again"
    )]
    Clock(String, &'static str),
    #[error(
        "there is a Ready node {0:?} in the cluster already; choose another name with --hostname-override, or remove that node first (`skiff leave` there)"
    )]
    NameTaken(String),
    #[error("the server runs {server}, this skiff is {own}: {why}")]
    OtherVersion {
        server: String,
        own: String,
        why: &'static str,
    },
    #[error(
        "{0} answers {1} for cluster-info; it is no cluster that can be joined by a token, or not ready yet"
    )]
    NoClusterInfo(String, u16),
    #[error(
        "the nodes of this cluster may not list {0}, which this node's network needs; its administrator allows it with `skiff node-roles | kubectl apply -f -`"
    )]
    NoRoles(String),
}

/// Why a server cannot be connected to.
pub fn connect(error: &ConnectError) -> Problem {
    use rustls::CertificateError as Certificate;
    match error {
        ConnectError::Tcp { server, source } => match source.kind() {
            ErrorKind::ConnectionRefused => Problem::Refused(server.clone()),
            ErrorKind::TimedOut => Problem::Silent(server.clone()),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::InvalidData => {
                Problem::NotTls(server.clone(), source.to_string())
            }
            _ => Problem::Unreachable(server.clone(), source.to_string()),
        },
        ConnectError::Timeout { server } => Problem::Silent(server.clone()),
        ConnectError::Tls { server, source } => match source {
            rustls::Error::InvalidCertificate(why) => match why {
                Certificate::NotValidForName | Certificate::NotValidForNameContext { .. } => {
                    Problem::OtherName(server.clone())
                }
                Certificate::NotValidYet
                | Certificate::NotValidYetContext { .. }
                | Certificate::Expired
                | Certificate::ExpiredContext { .. } => {
                    Problem::NotValidNow(server.clone(), Timestamp::now())
                }
                _ => Problem::OtherSigner(server.clone()),
            },
            other => Problem::NotTls(server.clone(), other.to_string()),
        },
        ConnectError::NoServer => Problem::Unreachable("no server".to_owned(), error.to_string()),
    }
}

pub fn no_cluster_info(server: &ServerAddress, code: u16) -> Problem {
    Problem::NoClusterInfo(server.to_string(), code)
}

/// Whether the clocks are too far apart. A server that does not tell the time is not asked again.
pub fn clock(server: Option<Timestamp>, own: Timestamp) -> Option<Problem> {
    let difference = own.as_second() - server?.as_second();
    if difference.abs() <= CLOCK_TOLERANCE_SECONDS {
        return None;
    }
    let direction = if difference < 0 { "behind" } else { "ahead of" };
    let seconds = difference.abs();
    let amount = match (seconds / 86_400, seconds % 86_400 / 3600, seconds % 3600 / 60) {
        (0, 0, minutes) => format!("{minutes} min"),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} days {hours} h"),
    };
    Some(Problem::Clock(amount, direction))
}

/// Whether a machine of our version works with the server's, of which it may be `older` minor versions.
pub fn version(server: &str, own: &str, older: u32) -> Option<Problem> {
    let minor = |text: &str| -> Option<(u32, u32)> {
        let mut numbers = text.trim_start_matches('v').split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    };
    let why = match (minor(server), minor(own)) {
        (Some(server), Some(own)) if server.0 == own.0 && server.1 < own.1 => {
            "a machine that joins must not be newer than the API server; upgrade the server first, or install its version here"
        }
        (Some(server), Some(own)) if server.0 == own.0 && server.1 - own.1 <= older => return None,
        (Some(_), Some(_)) => "this is too old for it; install the server's version here",
        _ => "these versions cannot be compared; install the server's version here",
    };
    Some(Problem::OtherVersion {
        server: server.to_owned(),
        own: own.to_owned(),
        why,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks() {
        let own: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        let check = |server: &str, expected: Option<&str>| {
            let told = clock(server.parse().ok(), own).map(|problem| problem.to_string());
            match (told, expected) {
                (None, None) => {}
                (Some(told), Some(expected)) => assert!(told.contains(expected), "{told}"),
                (told, _) => panic!("{server}: {told:?}"),
            }
        };
        check("2026-01-01T12:04:59Z", None);
        check("2026-01-01T11:55:00Z", None);
        check("2026-01-01T13:03:00Z", Some("1 h 3 min behind the server's"));
        check("2025-12-30T10:00:00Z", Some("2 days 2 h ahead of the server's"));
        check("no date", None);
    }

    #[test]
    fn versions() {
        let check = |server: &str, own: &str, expected: Option<&str>| {
            let told = version(server, own, OLDER_MINORS).map(|problem| problem.to_string());
            match (&told, expected) {
                (None, None) => {}
                (Some(told), Some(expected)) => assert!(told.contains(expected), "{told}"),
                _ => panic!("{server} {own}: {told:?}"),
            }
        };
        check("v1.36.4+skiff0.1.0", "v1.36.4+skiff0.1.0", None);
        check("v1.36.1", "v1.36.4+skiff0.1.0", None);
        check("v1.39.0", "v1.36.4", None);
        check("v1.35.9", "v1.36.4", Some("must not be newer"));
        check("v1.40.0", "v1.36.4", Some("too old"));
        check("v2.0.0", "v1.36.4", Some("too old"));
        check("nonsense", "v1.36.4", Some("cannot be compared"));
        assert!(version("v1.37.0", "v1.36.4", OLDER_SERVER_MINORS).is_none());
        assert!(version("v1.38.0", "v1.36.4", OLDER_SERVER_MINORS).is_some());
    }

    #[test]
    fn connections() {
        let server = || "https://192.0.2.1:6443".to_owned();
        let tcp = |kind: ErrorKind| ConnectError::Tcp {
            server: server(),
            source: kind.into(),
        };
        let tls = |why| ConnectError::Tls {
            server: server(),
            source: rustls::Error::InvalidCertificate(why),
        };
        use rustls::CertificateError as Certificate;
        for (error, expected) in [
            (tcp(ErrorKind::ConnectionRefused), "nothing listens there"),
            (tcp(ErrorKind::TimedOut), "a firewall may drop the packets"),
            (tcp(ErrorKind::HostUnreachable), "there is no way to this address"),
            (tcp(ErrorKind::UnexpectedEof), "does not speak TLS"),
            (
                ConnectError::Timeout { server: server() },
                "a firewall may drop the packets",
            ),
            (tls(Certificate::NotValidForName), "not valid for that name"),
            (tls(Certificate::NotValidYet), "set the clock"),
            (tls(Certificate::Expired), "set the clock"),
            (
                tls(Certificate::UnknownIssuer),
                "not signed by the cluster's authority",
            ),
        ] {
            let told = connect(&error).to_string();
            assert!(told.contains(expected), "{error:?}: {told}");
        }
    }
}
