//! Printing to standard output without a panic: `println!` panics when the reader is gone or the disk is full.

use std::fmt::Arguments;
use std::io::Write;

/// The exit code of a program that SIGPIPE ended, as shells report it.
const BROKEN_PIPE: i32 = 141;

/// Prints a line to standard output; a program that cannot ends with an error instead of a panic.
macro_rules! say {
    ($($part:tt)*) => { $crate::say::print(format_args!($($part)*), "\n") };
}

/// `say!` without the line's end.
macro_rules! say_raw {
    ($($part:tt)*) => { $crate::say::print(format_args!($($part)*), "") };
}

pub fn print(text: Arguments<'_>, end: &str) {
    let mut out = std::io::stdout().lock();
    let written = out
        .write_fmt(text)
        .and_then(|()| out.write_all(end.as_bytes()))
        .and_then(|()| out.flush());
    match written {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(BROKEN_PIPE),
        Err(error) => {
            complain(format_args!("cannot write to standard output: {error}"));
            std::process::exit(1);
        }
    }
}

/// The one form of an error message. Nobody may be left to read it.
pub fn complain(text: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "error: {text}");
}
