//! Which signal asks a container to stop.

use skiff_cri::v1 as cri;

/// The container's own, the image's, or SIGTERM.
pub fn stop_signal(config: &cri::ContainerConfig, image: &str) -> i32 {
    let own = config.stop_signal();
    if own != cri::Signal::RuntimeDefault
        && let Some(number) = signal_number(own.as_str_name())
    {
        return number;
    }
    signal_number(image).unwrap_or(libc::SIGTERM)
}

fn signal_number(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    let plain = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ILL", 4),
        ("TRAP", 5),
        ("ABRT", 6),
        ("IOT", 6),
        ("BUS", 7),
        ("FPE", 8),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("STKFLT", 16),
        ("CHLD", 17),
        ("CLD", 17),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("TTIN", 21),
        ("TTOU", 22),
        ("URG", 23),
        ("XCPU", 24),
        ("XFSZ", 25),
        ("VTALRM", 26),
        ("PROF", 27),
        ("WINCH", 28),
        ("IO", 29),
        ("POLL", 29),
        ("PWR", 30),
        ("SYS", 31),
        ("RTMIN", 34),
        ("RTMAX", 64),
    ];
    if let Some((_, number)) = plain.iter().find(|(known, _)| *known == short) {
        return Some(*number);
    }
    let offset = |prefixes: [&str; 2]| {
        prefixes
            .iter()
            .find_map(|prefix| short.strip_prefix(prefix)?.parse::<i32>().ok())
    };
    if let Some(plus) = offset(["RTMINPLUS", "RTMIN+"]) {
        return (0..=15).contains(&plus).then_some(34 + plus);
    }
    let minus = offset(["RTMAXMINUS", "RTMAX-"])?;
    (0..=14).contains(&minus).then_some(64 - minus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals() {
        let check = |name: &str, expected: Option<i32>| assert_eq!(signal_number(name), expected, "{name}");
        check("SIGTERM", Some(15));
        check("quit", Some(3));
        check("9", Some(9));
        check("SIGRTMIN+3", Some(37));
        check("SIGRTMINPLUS3", Some(37));
        check("SIGRTMAXMINUS1", Some(63));
        check("SIGRTMAX", Some(64));
        check("", None);
        check("99", None);
        for number in 1..=65 {
            let signal = cri::Signal::try_from(number).expect("signal");
            assert!(
                signal_number(signal.as_str_name()).is_some(),
                "{}",
                signal.as_str_name()
            );
        }
    }
}
