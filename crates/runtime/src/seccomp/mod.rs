//! Seccomp profiles and their compiler to the kernel's filter program. Written here and not taken from
//! libseccomp, so that the binary needs no C library and the filter is the same for first process and
//! exec.

pub mod default;
mod numbers;

use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("seccomp profile: {0}")]
    Parse(#[from] serde_json::Error),
    #[error("seccomp action SCMP_ACT_NOTIFY is not supported")]
    Notify,
    #[error("seccomp profile makes a filter of {0} instructions, more than the kernel's 4096")]
    TooLong(usize),
    #[error("seccomp argument index {0} is out of range")]
    Index(u32),
}

/// A profile in the OCI runtime specification's form.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Profile {
    pub default_action: Action,
    #[serde(default)]
    pub default_errno_ret: Option<u32>,
    #[serde(default)]
    pub syscalls: Vec<Rule>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rule {
    #[serde(default)]
    pub names: Vec<String>,
    pub action: Action,
    #[serde(default)]
    pub errno_ret: Option<u32>,
    #[serde(default)]
    pub args: Vec<Argument>,
}

impl Rule {
    fn plain<'a>(names: impl Iterator<Item = &'a str>, action: Action) -> Rule {
        Rule {
            names: names.map(str::to_owned).collect(),
            action,
            errno_ret: None,
            args: Vec::new(),
        }
    }

    fn on(name: &str, argument: Argument) -> Rule {
        Rule {
            names: vec![name.into()],
            action: Action::Allow,
            errno_ret: None,
            args: vec![argument],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Argument {
    pub index: u32,
    pub value: u64,
    #[serde(default)]
    pub value_two: u64,
    pub op: Operator,
}

impl Argument {
    fn new(index: u32, op: Operator, value: u64, value_two: u64) -> Argument {
        Argument {
            index,
            value,
            value_two,
            op,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    #[serde(rename = "SCMP_CMP_NE")]
    NotEqual,
    #[serde(rename = "SCMP_CMP_LT")]
    LessThan,
    #[serde(rename = "SCMP_CMP_LE")]
    LessEqual,
    #[serde(rename = "SCMP_CMP_EQ")]
    EqualTo,
    #[serde(rename = "SCMP_CMP_GE")]
    GreaterEqual,
    #[serde(rename = "SCMP_CMP_GT")]
    GreaterThan,
    #[serde(rename = "SCMP_CMP_MASKED_EQ")]
    MaskedEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    #[serde(rename = "SCMP_ACT_ALLOW")]
    Allow,
    #[serde(rename = "SCMP_ACT_ERRNO")]
    Errno,
    #[serde(rename = "SCMP_ACT_KILL", alias = "SCMP_ACT_KILL_THREAD")]
    Kill,
    #[serde(rename = "SCMP_ACT_KILL_PROCESS")]
    KillProcess,
    #[serde(rename = "SCMP_ACT_TRAP")]
    Trap,
    #[serde(rename = "SCMP_ACT_TRACE")]
    Trace,
    #[serde(rename = "SCMP_ACT_LOG")]
    Log,
    #[serde(rename = "SCMP_ACT_NOTIFY")]
    Notify,
}

impl Profile {
    pub fn parse(json: &[u8]) -> Result<Profile, Error> {
        Ok(serde_json::from_slice(json)?)
    }
}

fn return_value(action: Action, errno: Option<u32>) -> Result<u32, Error> {
    let errno = errno.unwrap_or(libc::EPERM as u32) & 0xffff;
    Ok(match action {
        Action::Allow => 0x7fff_0000,
        Action::Errno => 0x0005_0000 | errno,
        Action::Kill => 0,
        Action::KillProcess => 0x8000_0000,
        Action::Trap => 0x0003_0000,
        Action::Trace => 0x7ff0_0000 | errno,
        Action::Log => 0x7ffc_0000,
        Action::Notify => return Err(Error::Notify),
    })
}

const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER: u16 = 0x25;
const JUMP_GREATER_EQUAL: u16 = 0x35;
const RETURN: u16 = 0x06;

/// A jump to the end of the block under construction.
const FAIL: u8 = 255;

const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;

#[cfg(target_arch = "x86_64")]
const OWN_ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const OWN_ARCHITECTURE: u32 = 0xc000_00b7;

fn instruction(code: u16, jump_true: u8, jump_false: u8, value: u32) -> u64 {
    // The kernel's structure, little end first: u16 code, u8 jt, u8 jf, u32 k.
    u64::from(code) | u64::from(jump_true) << 16 | u64::from(jump_false) << 24 | u64::from(value) << 32
}

/// Compiles a profile. The first rule that matches a call decides.
pub fn compile(profile: &Profile) -> Result<Vec<u64>, Error> {
    let default = return_value(profile.default_action, profile.default_errno_ret)?;
    // Calls of another architecture have other numbers, which the rules do not know: where the default
    // lets calls pass, that would be a way around everything the profile forbids.
    let foreign = match profile.default_action {
        Action::Allow | Action::Log | Action::Trace => {
            return_value(Action::Errno, Some(libc::ENOSYS as u32))?
        }
        _ => default,
    };
    let mut program = vec![
        instruction(LOAD, 0, 0, ARCHITECTURE),
        instruction(JUMP_EQUAL, 1, 0, OWN_ARCHITECTURE),
        instruction(RETURN, 0, 0, foreign),
        instruction(LOAD, 0, 0, NUMBER),
    ];
    if matches!(profile.default_action, Action::Errno) {
        // COMPAT: a call unknown to the profile's author is "not there", not "not allowed". On x86_64
        // this also takes the x32 numbers.
        program.push(instruction(JUMP_GREATER, 0, 1, numbers::highest()));
        program.push(instruction(
            RETURN,
            0,
            0,
            return_value(Action::Errno, Some(libc::ENOSYS as u32))?,
        ));
    } else if cfg!(target_arch = "x86_64") {
        program.push(instruction(JUMP_GREATER_EQUAL, 0, 1, 0x4000_0000));
        program.push(instruction(
            RETURN,
            0,
            0,
            return_value(Action::Errno, Some(libc::ENOSYS as u32))?,
        ));
    }
    for rule in &profile.syscalls {
        let action = return_value(rule.action, rule.errno_ret)?;
        for name in &rule.names {
            // A profile names calls of other architectures and of older kernels too.
            let Some(number) = numbers::number(name) else {
                continue;
            };
            for alternative in alternatives(&rule.args) {
                emit(&mut program, number, &alternative, action)?;
            }
        }
    }
    program.push(instruction(RETURN, 0, 0, default));
    if program.len() > 4096 {
        return Err(Error::TooLong(program.len()));
    }
    Ok(program)
}

/// COMPAT: conditions on different arguments must all hold; several on the same one are alternatives.
fn alternatives(arguments: &[Argument]) -> Vec<Vec<Argument>> {
    let repeated = arguments.iter().enumerate().any(|(at, argument)| {
        arguments[..at]
            .iter()
            .any(|earlier| earlier.index == argument.index)
    });
    if repeated {
        arguments.iter().map(|argument| vec![*argument]).collect()
    } else {
        vec![arguments.to_vec()]
    }
}

fn emit(program: &mut Vec<u64>, number: u32, arguments: &[Argument], action: u32) -> Result<(), Error> {
    let mut block = Vec::new();
    for argument in arguments {
        if argument.index > 5 {
            return Err(Error::Index(argument.index));
        }
        condition(&mut block, argument);
    }
    block.push(instruction(RETURN, 0, 0, action));
    if !arguments.is_empty() {
        // The conditions took the accumulator; what follows looks at the call's number again.
        block.push(instruction(LOAD, 0, 0, NUMBER));
        let end = block.len() - 1;
        for (at, word) in block.iter_mut().enumerate() {
            let code = *word as u16;
            if code != JUMP_EQUAL && code != JUMP_GREATER && code != JUMP_GREATER_EQUAL {
                continue;
            }
            // Six arguments of six instructions at most: the distance fits.
            let distance = (end - at - 1) as u64;
            for shift in [16, 24] {
                if (*word >> shift) as u8 == FAIL {
                    *word = *word & !(0xff << shift) | distance << shift;
                }
            }
        }
    }
    program.push(instruction(JUMP_EQUAL, 0, block.len() as u8, number));
    program.extend(block);
    Ok(())
}

fn condition(block: &mut Vec<u64>, argument: &Argument) {
    let low_offset = 16 + 8 * argument.index;
    let load_low = instruction(LOAD, 0, 0, low_offset);
    let load_high = instruction(LOAD, 0, 0, low_offset + 4);
    let (low, high) = (argument.value as u32, (argument.value >> 32) as u32);
    let jump = |code, on_true, on_false, value| instruction(code, on_true, on_false, value);
    match argument.op {
        Operator::EqualTo => block.extend([
            load_high,
            jump(JUMP_EQUAL, 0, FAIL, high),
            load_low,
            jump(JUMP_EQUAL, 0, FAIL, low),
        ]),
        Operator::NotEqual => block.extend([
            load_high,
            jump(JUMP_EQUAL, 0, 2, high),
            load_low,
            jump(JUMP_EQUAL, FAIL, 0, low),
        ]),
        Operator::GreaterThan | Operator::GreaterEqual => {
            let last = if argument.op == Operator::GreaterThan {
                JUMP_GREATER
            } else {
                JUMP_GREATER_EQUAL
            };
            block.extend([
                load_high,
                jump(JUMP_GREATER, 3, 0, high),
                jump(JUMP_EQUAL, 0, FAIL, high),
                load_low,
                jump(last, 0, FAIL, low),
            ]);
        }
        Operator::LessThan | Operator::LessEqual => {
            let last = if argument.op == Operator::LessThan {
                JUMP_GREATER_EQUAL
            } else {
                JUMP_GREATER
            };
            block.extend([
                load_high,
                jump(JUMP_GREATER, FAIL, 0, high),
                jump(JUMP_EQUAL, 0, 2, high),
                load_low,
                jump(last, FAIL, 0, low),
            ]);
        }
        Operator::MaskedEqual => {
            let (want_low, want_high) = (argument.value_two as u32, (argument.value_two >> 32) as u32);
            block.extend([
                load_high,
                instruction(AND, 0, 0, high),
                jump(JUMP_EQUAL, 0, FAIL, want_high),
                load_low,
                instruction(AND, 0, 0, low),
                jump(JUMP_EQUAL, 0, FAIL, want_low),
            ]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's machine in ten lines: what the filter says of a call.
    fn evaluate(program: &[u64], number: u32, arguments: [u64; 6]) -> u32 {
        evaluate_on(OWN_ARCHITECTURE, program, number, arguments)
    }

    fn evaluate_on(architecture: u32, program: &[u64], number: u32, arguments: [u64; 6]) -> u32 {
        let (mut accumulator, mut at) = (0u32, 0usize);
        loop {
            let word = program[at];
            let (code, jt, jf, k) = (
                word as u16,
                (word >> 16) as u8,
                (word >> 24) as u8,
                (word >> 32) as u32,
            );
            at += 1;
            let test = match code {
                LOAD => {
                    accumulator = match k {
                        NUMBER => number,
                        ARCHITECTURE => architecture,
                        offset => {
                            let value = arguments[(offset as usize - 16) / 8];
                            if offset % 8 == 0 {
                                value as u32
                            } else {
                                (value >> 32) as u32
                            }
                        }
                    };
                    continue;
                }
                AND => {
                    accumulator &= k;
                    continue;
                }
                RETURN => return k,
                JUMP_EQUAL => accumulator == k,
                JUMP_GREATER => accumulator > k,
                JUMP_GREATER_EQUAL => accumulator >= k,
                other => panic!("instruction {other:#x}"),
            };
            at += usize::from(if test { jt } else { jf });
        }
    }

    const ALLOWED: u32 = 0x7fff_0000;
    const EPERM: u32 = 0x0005_0001;
    const ENOSYS: u32 = 0x0005_0000 | libc::ENOSYS as u32;

    #[test]
    fn default_profile() {
        let number = |name: &str| numbers::number(name).expect("known call");
        let check = |capabilities: u64, name: &str, first: u64, expected: u32| {
            let program = compile(&default::profile(capabilities)).expect("the default profile compiles");
            assert_eq!(
                evaluate(&program, number(name), [first, 0, 0, 0, 0, 0]),
                expected,
                "{name}"
            );
        };
        check(0, "read", 0, ALLOWED);
        check(0, "mount", 0, EPERM);
        check(1 << default::CAP_SYS_ADMIN, "mount", 0, ALLOWED);
        check(0, "clone", libc::SIGCHLD as u64, ALLOWED);
        check(0, "clone", libc::CLONE_NEWUSER as u64, EPERM);
        check(0, "clone3", 0, ENOSYS);
        check(0, "unshare", 0, EPERM);
        check(0, "personality", 0xffff_ffff, ALLOWED);
        check(0, "personality", 0x1_0000_0000, EPERM);
        check(0, "socket", libc::AF_INET as u64, ALLOWED);
        check(0, "socket", libc::AF_VSOCK as u64, EPERM);
        let program = compile(&default::profile(0)).expect("compiles");
        assert_eq!(evaluate(&program, numbers::highest() + 1, [0; 6]), ENOSYS);
    }

    #[test]
    fn calls_of_other_architectures() {
        const I386: u32 = 0x4000_0003;
        let check = |default_action: Action, expected: u32| {
            let profile = Profile {
                default_action,
                default_errno_ret: None,
                syscalls: vec![Rule::plain(["mount"].into_iter(), Action::Errno)],
            };
            let program = compile(&profile).expect("compiles");
            assert_eq!(
                evaluate_on(I386, &program, 21, [0; 6]),
                expected,
                "{default_action:?}"
            );
        };
        check(Action::Allow, ENOSYS);
        check(Action::Log, ENOSYS);
        check(Action::Errno, EPERM);
        check(Action::KillProcess, 0x8000_0000);
    }

    #[test]
    fn comparisons() {
        let check = |op: Operator, value: u64, two: u64, argument: u64, matches: bool| {
            let rule = Rule::on("read", Argument::new(2, op, value, two));
            let profile = Profile {
                default_action: Action::Errno,
                default_errno_ret: None,
                syscalls: vec![rule],
            };
            let program = compile(&profile).expect("compiles");
            let number = numbers::number("read").expect("read");
            let expected = if matches { ALLOWED } else { EPERM };
            assert_eq!(
                evaluate(&program, number, [0, 0, argument, 0, 0, 0]),
                expected,
                "{argument} {op:?} {value}"
            );
        };
        let big = 1 << 40;
        for (left, right) in [
            (1, 2),
            (2, 2),
            (3, 2),
            (big, 2),
            (2, big),
            (big + 1, big),
            (big, big),
            (big, big + 1),
        ] {
            check(Operator::EqualTo, right, 0, left, left == right);
            check(Operator::NotEqual, right, 0, left, left != right);
            check(Operator::LessThan, right, 0, left, left < right);
            check(Operator::LessEqual, right, 0, left, left <= right);
            check(Operator::GreaterThan, right, 0, left, left > right);
            check(Operator::GreaterEqual, right, 0, left, left >= right);
        }
        check(Operator::MaskedEqual, 0xf0, 0x10, 0x1f, true);
        check(Operator::MaskedEqual, 0xf0, 0x10, 0x2f, false);
    }

    #[test]
    fn parses_profiles() {
        let json = br#"{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64"],
            "syscalls":[{"names":["mkdir","no_such_call"],"action":"SCMP_ACT_ERRNO","errnoRet":13,
            "args":[{"index":1,"value":448,"op":"SCMP_CMP_EQ"},{"index":1,"value":511,"op":"SCMP_CMP_EQ"}]}]}"#;
        let program = compile(&Profile::parse(json).expect("parses")).expect("compiles");
        let mkdir = numbers::number("mkdir").expect("mkdir");
        assert_eq!(evaluate(&program, mkdir, [0, 511, 0, 0, 0, 0]), 0x0005_000d);
        assert_eq!(evaluate(&program, mkdir, [0, 448, 0, 0, 0, 0]), 0x0005_000d);
        assert_eq!(evaluate(&program, mkdir, [0, 0, 0, 0, 0, 0]), ALLOWED);
        assert!(Profile::parse(b"{\"defaultAction\":\"SCMP_ACT_ALOW\"}").is_err());
    }
}
