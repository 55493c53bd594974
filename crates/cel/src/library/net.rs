//! Addresses and networks: `ip('10.0.0.1')`, `cidr('10.0.0.0/8').containsIP('10.1.2.3')`.

use std::fmt;
use std::net::IpAddr;

use skiff_meta::field::quote;

use super::Native;
use crate::error::EvalError;
use crate::value::{Eval, Value};

/// An address with the length of its network's prefix; the address is kept as written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The bits of an address, from the left, and how many there are.
fn bits(address: &IpAddr) -> (u128, u8) {
    match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    }
}

fn mask(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0)
}

impl Cidr {
    fn contains(&self, address: &IpAddr) -> bool {
        let ((own, family), (other, other_family)) = (bits(&self.address), bits(address));
        family == other_family && (own ^ other) & mask(self.prefix) == 0
    }

    fn masked(&self) -> Self {
        let (own, family) = bits(&self.address);
        let kept = own & mask(self.prefix);
        let address = match family {
            32 => IpAddr::from(((kept >> 96) as u32).to_be_bytes()),
            _ => IpAddr::from(kept.to_be_bytes()),
        };
        Self { address, ..*self }
    }
}

fn parse_ip(text: &str) -> Result<IpAddr, String> {
    let problem = |what: &str| {
        format!(
            "IP Address {0} parse error during conversion from string: ParseAddr({0}): {what}",
            quote(text)
        )
    };
    if let Some((address, _)) = text.split_once('%')
        && address.contains(':')
        && address.parse::<IpAddr>().is_ok()
    {
        return Err(format!(
            "IP address {} with zone value is not allowed",
            quote(text)
        ));
    }
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address {} is not allowed", quote(text)))
        }
        Ok(address) => Ok(address),
        Err(_) => Err(problem(ip_problem(text))),
    }
}

/// What is wrong with an address, in Go's words for the common cases.
fn ip_problem(text: &str) -> &'static str {
    match text.find(['.', ':', '%']).map(|at| &text[at..=at]) {
        None => "unable to parse IP",
        Some(".") => {
            let fields: Vec<&str> = text.split('.').collect();
            if fields
                .iter()
                .any(|field| field.bytes().any(|c| !c.is_ascii_digit()))
            {
                "unexpected character"
            } else if fields.iter().any(|field| field.is_empty()) {
                "IPv4 field must have at least one digit"
            } else if fields
                .iter()
                .any(|field| field.len() > 1 && field.starts_with('0'))
            {
                "IPv4 field has octet with leading zero"
            } else if fields
                .iter()
                .any(|field| field.len() > 3 || field.parse::<u16>().is_ok_and(|n| n > 255))
            {
                "IPv4 field has value >255"
            } else if fields.len() > 4 {
                "IPv4 address too long"
            } else {
                "IPv4 address too short"
            }
        }
        Some("%") => "missing IPv6 address",
        _ => "unable to parse IP",
    }
}

fn parse_cidr(text: &str) -> Result<Cidr, String> {
    let problem = |what: String| {
        format!(
            "network address parse error during conversion from string: netip.ParsePrefix({}): {what}",
            quote(text)
        )
    };
    let Some((address, prefix)) = text.rsplit_once('/') else {
        return Err(problem("no '/'".to_owned()));
    };
    if address.contains('%') {
        return Err(problem("IPv6 zones cannot be present in a prefix".to_owned()));
    }
    let address: IpAddr = address
        .parse()
        .map_err(|_| problem(format!("ParseAddr({}): {}", quote(address), ip_problem(address))))?;
    let plain = !prefix.is_empty() && prefix.bytes().all(|c| c.is_ascii_digit());
    let leading_zero = prefix.len() > 1 && prefix.starts_with('0');
    if !plain || leading_zero {
        return Err(problem(format!("bad bits after slash: {}", quote(prefix))));
    }
    let family = bits(&address).1;
    let prefix = prefix
        .parse::<u8>()
        .ok()
        .filter(|prefix| *prefix <= family)
        .ok_or_else(|| problem("prefix length out of range".to_owned()))?;
    if let IpAddr::V6(v6) = address
        && v6.to_ipv4_mapped().is_some()
    {
        return Err(format!("IPv4-mapped IPv6 address {} is not allowed", quote(text)));
    }
    Ok(Cidr { address, prefix })
}

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "ip" => |_, args| match args {
            [Value::String(text)] => parse_ip(text).map(Value::Ip).map_err(EvalError::new),
            [Value::Cidr(cidr)] => Ok(Value::Ip(cidr.address)),
            _ => Err(EvalError::no_such_overload()),
        },
        "isIP" => |_, args| with_text(args, |text| Ok(parse_ip(text).is_ok())),
        "ip.isCanonical" => |_, args| {
            with_text(args, |text| {
                let address = parse_ip(text).map_err(EvalError::new)?;
                Ok(address.to_string() == text)
            })
        },
        "family" => |_, args| match args {
            [Value::Ip(IpAddr::V4(_))] => Ok(Value::Int(4)),
            [Value::Ip(IpAddr::V6(_))] => Ok(Value::Int(6)),
            _ => Err(EvalError::no_such_overload()),
        },
        "isUnspecified" => |_, args| is(args, |address| address.is_unspecified()),
        "isLoopback" => |_, args| is(args, |address| address.is_loopback()),
        "isLinkLocalMulticast" => |_, args| {
            is(args, |address| match address {
                IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
                IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
            })
        },
        "isLinkLocalUnicast" => |_, args| is(args, link_local),
        "isGlobalUnicast" => |_, args| {
            is(args, |address| {
                let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
                !address.is_unspecified()
                    && !address.is_loopback()
                    && !address.is_multicast()
                    && !link_local(address)
                    && !broadcast
            })
        },
        "cidr" => |_, args| match args {
            [Value::String(text)] => network(text).map(Value::Cidr),
            _ => Err(EvalError::no_such_overload()),
        },
        "isCIDR" => |_, args| with_text(args, |text| Ok(parse_cidr(text).is_ok())),
        "containsIP" => |_, args| match args {
            [Value::Cidr(cidr), Value::Ip(address)] => Ok(Value::Bool(cidr.contains(address))),
            // COMPAT: what is wrong with the text is not told here.
            [Value::Cidr(cidr), Value::String(text)] => match parse_ip(text) {
                Ok(address) => Ok(Value::Bool(cidr.contains(&address))),
                Err(_) => Err(EvalError::no_such_overload()),
            },
            _ => Err(EvalError::no_such_overload()),
        },
        "containsCIDR" => |_, args| {
            let (outer, inner) = match args {
                [Value::Cidr(outer), Value::Cidr(inner)] => (*outer, *inner),
                [Value::Cidr(outer), Value::String(text)] => (*outer, network(text)?),
                _ => return Err(EvalError::no_such_overload()),
            };
            Ok(Value::Bool(
                outer.prefix <= inner.prefix && outer.contains(&inner.address),
            ))
        },
        "prefixLength" => |_, args| match args {
            [Value::Cidr(cidr)] => Ok(Value::Int(i64::from(cidr.prefix))),
            _ => Err(EvalError::no_such_overload()),
        },
        "masked" => |_, args| match args {
            [Value::Cidr(cidr)] => Ok(Value::Cidr(cidr.masked())),
            _ => Err(EvalError::no_such_overload()),
        },
        _ => return None,
    })
}

fn network(text: &str) -> Eval<Cidr> {
    parse_cidr(text).map_err(|problem| {
        EvalError::new(format!(
            "network address parse error during conversion from string: {problem}"
        ))
    })
}

fn link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

fn with_text<'a>(args: &[Value<'a>], apply: fn(&str) -> Eval<bool>) -> Eval<Value<'a>> {
    match args {
        [Value::String(text)] => apply(text).map(Value::Bool),
        _ => Err(EvalError::no_such_overload()),
    }
}

fn is<'a>(args: &[Value<'a>], test: fn(&IpAddr) -> bool) -> Eval<Value<'a>> {
    match args {
        [Value::Ip(address)] => Ok(Value::Bool(test(address))),
        _ => Err(EvalError::no_such_overload()),
    }
}
