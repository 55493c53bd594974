//! Another time of day for one running process. Time namespaces shift monotonic clocks only, and a static binary takes no
//! preloaded library; but every process asks the time by code that the kernel mapped into it (the vDSO), and that page
//! can be changed for one process as debuggers do. What is written there asks the kernel and adds some seconds.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// A process whose clock is wrong for as long as this value lives.
pub struct ShiftedClock {
    pid: u32,
    page: Range<u64>,
    memory: File,
    /// What was at these addresses before.
    original: Vec<(u64, Vec<u8>)>,
}

impl ShiftedClock {
    pub fn new(pid: u32, seconds: i32) -> Result<ShiftedClock> {
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let page = mapped(pid)?;
        let mut image = vec![0; usize::try_from(page.end - page.start)?];
        memory.read_exact_at(&mut image, page.start)?;
        let (mut original, mut changed) = (Vec::new(), Vec::new());
        for (name, code) in functions(seconds) {
            let (offset, size) = find(&image, name).with_context(|| format!("the vDSO has no {name}"))?;
            ensure!(size >= code.len(), "the kernel's {name} has {size} bytes only");
            let at = page.start + offset as u64;
            original.push((at, image[offset..offset + code.len()].to_vec()));
            changed.push((at, code));
        }
        let clock = ShiftedClock {
            pid,
            page,
            memory,
            original,
        };
        clock.write(&changed)?;
        Ok(clock)
    }

    fn write(&self, functions: &[(u64, Vec<u8>)]) -> Result<()> {
        // Nobody must be in the middle of what is replaced.
        let _stopped = Stopped::outside(self.pid, &self.page)?;
        for (at, code) in functions {
            self.memory.write_all_at(code, *at)?;
        }
        Ok(())
    }
}

impl Drop for ShiftedClock {
    fn drop(&mut self) {
        // A process that is gone needs no clock.
        if mapped(self.pid).is_ok_and(|page| page == self.page) {
            let _ = self.write(&self.original);
        }
    }
}

/// Where the vDSO is in a process.
fn mapped(pid: u32) -> Result<Range<u64>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"));
    let range = line.and_then(|line| line.split(' ').next()?.split_once('-'));
    let (start, end) = range.context("the process has no vDSO")?;
    Ok(u64::from_str_radix(start, 16)?..u64::from_str_radix(end, 16)?)
}

/// The offset and the size of a function in an ELF image.
fn find(image: &[u8], function: &str) -> Option<(usize, usize)> {
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(image.get(at..at + bytes)?);
        usize::try_from(u64::from_le_bytes(value)).ok()
    };
    let (headers, count) = (number(32, 8)?, number(56, 2)?);
    let dynamic = (0..count)
        .map(|index| headers + index * 56)
        .find(|at| number(*at, 4) == Some(2))?;
    let (dynamic, length) = (number(dynamic + 8, 8)?, number(dynamic + 32, 8)?);
    let entry = |tag: usize| {
        let at = (dynamic..dynamic + length)
            .step_by(16)
            .find(|at| number(*at, 8) == Some(tag))?;
        number(at + 8, 8)
    };
    // The table of symbols ends where that of their names begins.
    let (names, symbols) = (entry(5)?, entry(6)?);
    let symbol = (symbols..names).step_by(24).find(|at| {
        let name = number(*at, 4).and_then(|name| image.get(names + name..));
        name.is_some_and(|name| name.starts_with(function.as_bytes()) && name.get(function.len()) == Some(&0))
    })?;
    Some((number(symbol + 8, 8)?, number(symbol + 16, 8)?))
}

/// Each asks the kernel, and adds `seconds` to the time of day.
fn functions(seconds: i32) -> [(&'static str, Vec<u8>); 3] {
    let seconds = seconds.to_le_bytes();
    // clock_gettime(clock: edi, time: rsi); CLOCK_REALTIME is 0, CLOCK_REALTIME_COARSE 5.
    let clock_gettime = [
        &[0xb8, 228, 0, 0, 0][..], // mov eax, clock_gettime
        &[0x0f, 0x05],             // syscall
        &[0x85, 0xff],             // test edi, edi
        &[0x74, 0x06],             // je add
        &[0x83, 0xff, 5],          // cmp edi, 5
        &[0x74, 0x01],             // je add
        &[0xc3],                   // ret
        &[0x48, 0x81, 0x06],       // add: add qword ptr [rsi], seconds
        &seconds,
        &[0xc3], // ret
    ];
    // gettimeofday(time: rdi, zone: rsi)
    let gettimeofday = [
        &[0xb8, 96, 0, 0, 0][..], // mov eax, gettimeofday
        &[0x0f, 0x05],            // syscall
        &[0x48, 0x85, 0xff],      // test rdi, rdi
        &[0x74, 0x07],            // je end
        &[0x48, 0x81, 0x07],      // add qword ptr [rdi], seconds
        &seconds,
        &[0xc3], // end: ret
    ];
    // time(time: rdi)
    let time = [
        &[0xb8, 201, 0, 0, 0][..], // mov eax, time
        &[0x57],                   // push rdi
        &[0x31, 0xff],             // xor edi, edi
        &[0x0f, 0x05],             // syscall
        &[0x5f],                   // pop rdi
        &[0x48, 0x05],             // add rax, seconds
        &seconds,
        &[0x48, 0x85, 0xff], // test rdi, rdi
        &[0x74, 0x03],       // je end
        &[0x48, 0x89, 0x07], // mov [rdi], rax
        &[0xc3],             // end: ret
    ];
    [
        ("__vdso_clock_gettime", clock_gettime.concat()),
        ("__vdso_gettimeofday", gettimeofday.concat()),
        ("__vdso_time", time.concat()),
    ]
}

/// A process that is stopped.
struct Stopped(u32);

impl Stopped {
    /// Stops a process at a moment when none of its threads is within these addresses.
    fn outside(pid: u32, addresses: &Range<u64>) -> Result<Stopped> {
        for _ in 0..100 {
            let stopped = Stopped(pid);
            signal("STOP", pid)?;
            if all_outside(pid, addresses)? {
                return Ok(stopped);
            }
            drop(stopped);
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("a thread of {pid} asks the time all the time")
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = signal("CONT", self.0);
    }
}

fn signal(name: &str, pid: u32) -> Result<()> {
    let sent = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .status()?;
    ensure!(sent.success(), "kill -{name} {pid}");
    Ok(())
}

fn all_outside(pid: u32, addresses: &Range<u64>) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let path: PathBuf = thread?.path().join("syscall");
        // The last word is the thread's program counter; there is none while it runs.
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let counter = text
            .split_whitespace()
            .last()
            .and_then(|word| word.strip_prefix("0x"));
        match counter.and_then(|word| u64::from_str_radix(word, 16).ok()) {
            Some(counter) if !addresses.contains(&counter) => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    use std::time::UNIX_EPOCH;

    /// A shell that tells the time whenever it is asked has another one, and then its own again.
    #[test]
    fn one_process_is_an_hour_ahead() {
        let mut shell = Command::new("bash")
            .args(["-c", "while read; do echo $EPOCHSECONDS; done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut ask, mut answers) = (
            shell.stdin.take().unwrap(),
            BufReader::new(shell.stdout.take().unwrap()),
        );
        let mut ahead = || -> u64 {
            let mut line = String::new();
            ask.write_all(b"\n").unwrap();
            answers.read_line(&mut line).unwrap();
            let told: u64 = line.trim().parse().unwrap();
            told.saturating_sub(UNIX_EPOCH.elapsed().unwrap().as_secs())
        };
        assert_eq!(ahead(), 0);
        let clock = ShiftedClock::new(shell.id(), 3600).unwrap();
        assert!(ahead() > 3000, "{}", ahead());
        drop(clock);
        assert_eq!(ahead(), 0);
        drop(ask);
        shell.wait().unwrap();
    }
}
