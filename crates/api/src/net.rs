//! Addresses and networks in objects: strict reading with upstream's complaints.

use std::collections::BTreeSet;
use std::net::IpAddr;

use skiff_meta::field;

use crate::errors::Errors;
use crate::node::Node;

const BAD_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
const BAD_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

/// Reads an IPv4 address whose numbers may have leading zeros, as Go once did.
fn sloppy_v4(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    parts.len() == 4
        && parts.iter().all(|p| {
            !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()) && p.parse::<u32>().is_ok_and(|n| n < 256)
        })
}

fn mapped(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some())
}

/// A plain address; other spellings of the same address are allowed in older fields.
pub fn ip(at: &Node, errors: &mut Errors) -> Option<IpAddr> {
    match at.str().parse::<IpAddr>() {
        Ok(address) if mapped(address) => {
            errors.invalid(at, "must not be an IPv4-mapped IPv6 address");
            None
        }
        Ok(address) => Some(address),
        Err(_) if sloppy_v4(at.str()) => {
            errors.invalid(at, "must not have leading 0s");
            None
        }
        Err(_) => {
            errors.invalid(at, BAD_IP);
            None
        }
    }
}

/// A plain address, or one that was there before it had to be. Says whether it may stay.
pub fn ip_unless_known(at: &Node, known: &BTreeSet<&str>, errors: &mut Errors) -> bool {
    known.contains(at.str()) || ip(at, errors).is_some()
}

/// `10.0.0.0/8`: address and prefix length, if the text is that.
pub fn parse_cidr(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let address: IpAddr = address.parse().ok()?;
    if bits.len() > 1 && bits.starts_with('0') || !bits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let bits: u8 = bits.parse().ok()?;
    (bits <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, bits))
}

fn masked(address: IpAddr, bits: u8) -> bool {
    match address {
        IpAddr::V4(v4) => v4.to_bits() & u32::MAX.checked_shr(bits.into()).unwrap_or(0) == 0,
        IpAddr::V6(v6) => v6.to_bits() & u128::MAX.checked_shr(bits.into()).unwrap_or(0) == 0,
    }
}

/// Whether a network holds an address.
pub fn contains((network, bits): (IpAddr, u8), address: IpAddr) -> bool {
    match (network, address) {
        (IpAddr::V4(n), IpAddr::V4(a)) => {
            (n.to_bits() ^ a.to_bits())
                .checked_shr(32 - u32::from(bits))
                .unwrap_or(0)
                == 0
        }
        (IpAddr::V6(n), IpAddr::V6(a)) => {
            (n.to_bits() ^ a.to_bits())
                .checked_shr(128 - u32::from(bits))
                .unwrap_or(0)
                == 0
        }
        _ => false,
    }
}

/// Reads an address as Go once did.
pub fn sloppy_ip(text: &str) -> Option<IpAddr> {
    if !sloppy_v4(text) {
        return text.parse().ok();
    }
    let mut numbers = text.split('.').map(|part| part.parse::<u8>());
    let mut next = || numbers.next()?.ok();
    Some(IpAddr::from([next()?, next()?, next()?, next()?]))
}

/// Reads a network as Go once did.
pub fn sloppy_cidr(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let address = sloppy_ip(address)?;
    let digits = !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit());
    let bits = bits.parse::<u8>().ok().filter(|_| digits)?;
    (bits <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, bits))
}

/// What there is to say of an address that was let in.
pub fn ip_warning(at: &Node) -> Option<String> {
    let (path, quoted) = (at.path(), field::quote(at.str()));
    let read = sloppy_ip(at.str())?;
    let standard = at.str().parse::<IpAddr>().is_ok();
    match read {
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => Some(format!(
                "{path}: non-standard IP address {quoted} is invalid: use \"{v4}\""
            )),
            None => (v6.to_string() != at.str()).then(|| {
                format!("{path}: IPv6 address {quoted} should be in RFC 5952 canonical format (\"{v6}\")")
            }),
        },
        IpAddr::V4(v4) => {
            (!standard).then(|| format!("{path}: non-standard IP address {quoted} is invalid: use \"{v4}\""))
        }
    }
}

/// What there is to say of a network that was let in.
pub fn cidr_warnings(at: &Node) -> Vec<String> {
    let (path, quoted) = (at.path(), field::quote(at.str()));
    let Some((address, bits)) = sloppy_cidr(at.str()) else {
        return Vec::new();
    };
    let network = match address {
        IpAddr::V4(v4) => {
            IpAddr::from((v4.to_bits() & !u32::MAX.checked_shr(bits.into()).unwrap_or(0)).to_be_bytes())
        }
        IpAddr::V6(v6) => {
            IpAddr::from((v6.to_bits() & !u128::MAX.checked_shr(bits.into()).unwrap_or(0)).to_be_bytes())
        }
    };
    let mut warnings = Vec::new();
    if network != address {
        let whole = if address.is_ipv4() { 32 } else { 128 };
        warnings.push(format!("{path}: CIDR value {quoted} is ambiguous in this context (should be \"{network}/{bits}\" or \"{address}/{whole}\"?)"));
    }
    if parse_cidr(at.str()).is_none() || mapped(address) {
        warnings.push(format!(
            "{path}: non-standard CIDR value {quoted} is invalid: use \"{network}/{bits}\""
        ));
    }
    let canonical = format!("{address}/{bits}");
    if warnings.is_empty() && address.is_ipv6() && canonical != at.str() {
        warnings.push(format!(
            "{path}: IPv6 CIDR value {quoted} should be in RFC 5952 canonical format (\"{canonical}\")"
        ));
    }
    warnings
}

/// A network.
pub fn cidr(at: &Node, errors: &mut Errors) -> Option<(IpAddr, u8)> {
    let Some((address, bits)) = parse_cidr(at.str()) else {
        let sloppy = at.str().split_once('/').is_some_and(|(a, b)| {
            (sloppy_v4(a) || a.parse::<IpAddr>().is_ok())
                && b.parse::<u8>()
                    .is_ok_and(|b| b <= if a.contains(':') { 128 } else { 32 })
        });
        errors.invalid(
            at,
            if sloppy {
                "must not have leading 0s in IP or prefix length"
            } else {
                BAD_CIDR
            },
        );
        return None;
    };
    if mapped(address) {
        errors.invalid(at, "must not have an IPv4-mapped IPv6 address");
    } else if !masked(address, bits) {
        errors.invalid(at, "must not have bits set beyond the prefix length");
    }
    Some((address, bits))
}

/// `10.0.0.1/8`: an address and the network it is in, in canonical spelling.
pub fn interface_address(at: &Node, errors: &mut Errors) {
    let Some((address, bits)) = parse_cidr(at.str()) else {
        errors.invalid(
            at,
            "must be a valid address in CIDR form, (e.g. 10.9.8.7/24 or 2001:db8::1/64)",
        );
        return;
    };
    let canonical = format!("{address}/{bits}");
    if canonical != at.str() {
        errors.invalid(at, format!("must be in canonical form (\"{canonical}\")"));
    }
}

/// A network in its one canonical spelling, for newer fields.
pub fn canonical_cidr(at: &Node, errors: &mut Errors) {
    let Some((address, bits)) = parse_cidr(at.str()) else {
        errors.invalid(at, BAD_CIDR);
        return;
    };
    let mut shown = address;
    if !masked(address, bits) {
        shown = match address {
            IpAddr::V4(v4) => {
                let host = u32::MAX.checked_shr(bits.into()).unwrap_or(0);
                IpAddr::V4((v4.to_bits() & !host).into())
            }
            IpAddr::V6(v6) => {
                let host = u128::MAX.checked_shr(bits.into()).unwrap_or(0);
                IpAddr::V6((v6.to_bits() & !host).into())
            }
        };
    }
    let canonical = format!("{shown}/{bits}");
    if canonical != at.str() {
        errors.invalid(at, format!("must be in canonical form (\"{canonical}\")"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(rule: fn(&Node, &mut Errors) -> bool, text: &str, expected: &str) {
        let object = json!({ "a": text });
        let root = Node::root(&object);
        let mut errors = Errors::new();
        rule(&root.field("a"), &mut errors);
        let found: Vec<String> = errors.into_vec().iter().map(|e| e.detail.clone()).collect();
        assert_eq!(found.join("|"), expected, "{text}");
    }

    #[test]
    fn addresses() {
        let rule = |n: &Node, e: &mut Errors| ip(n, e).is_some();
        check(rule, "10.0.0.1", "");
        check(rule, "FE80::1", "");
        check(rule, "010.0.0.1", "must not have leading 0s");
        check(rule, "::ffff:1.2.3.4", "must not be an IPv4-mapped IPv6 address");
        check(rule, "x", BAD_IP);
    }

    #[test]
    fn networks() {
        let rule = |n: &Node, e: &mut Errors| cidr(n, e).is_some();
        check(rule, "10.0.0.0/8", "");
        check(rule, "0.0.0.0/0", "");
        check(rule, "::/0", "");
        check(
            rule,
            "10.0.0.1/8",
            "must not have bits set beyond the prefix length",
        );
        check(
            rule,
            "10.0.0.0/08",
            "must not have leading 0s in IP or prefix length",
        );
        check(rule, "10.0.0.0/33", BAD_CIDR);
    }
}
