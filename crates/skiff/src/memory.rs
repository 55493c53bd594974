//! What the server gives back to the machine: memory that a burst needed, and the pages of the binary that only the
//! start needed. It changes what is resident, never what anything holds.

use std::cell::Cell;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// How long freed memory waits to be used again. The allocator's own choice is a second; what a request leaves
/// behind is used again within a few milliseconds or not at all.
const PURGE_DELAY_MS: libc::c_long = 100;
/// `mi_option_purge_delay` of mimalloc, versions 2 and 3.
const PURGE_DELAY_OPTION: libc::c_int = 15;
/// How often a thread that has nothing to do clears up after itself.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// When the start is over, and what is resident is what is needed.
const SETTLED: Duration = Duration::from_secs(2);
const RELEASE_EVERY: Duration = Duration::from_secs(300);

unsafe extern "C" {
    fn mi_collect(force: bool);
    fn mi_option_set_default(option: libc::c_int, value: libc::c_long);
    /// The linker's: the first byte of the loaded binary, and the one after its code.
    static __executable_start: u8;
    static etext: u8;
}

/// To be called once, early. `MIMALLOC_PURGE_DELAY` in the environment wins.
pub fn prepare() {
    // SAFETY: it sets one number of the allocator, under any circumstances.
    unsafe { mi_option_set_default(PURGE_DELAY_OPTION, PURGE_DELAY_MS) };
}

/// For a thread about to sleep. The allocator gives memory back only while it is asked for some, so without this an
/// idle process would keep all that its last burst used.
pub fn tidy() {
    thread_local!(static LAST: Cell<Option<Instant>> = const { Cell::new(None) });
    LAST.with(|last| {
        let now = Instant::now();
        if last
            .get()
            .is_none_or(|last| now.duration_since(last) >= TIDY_EVERY)
        {
            last.set(Some(now));
            // SAFETY: it frees what is free already.
            unsafe { mi_collect(false) };
        }
    });
}

/// Lets go of the binary's pages, now that the start is over and from time to time: the kernel maps those around a
/// page that is used as well, and most of the code runs once or never. What is used again comes back by a minor
/// fault.
pub async fn keep_small(stop: CancellationToken) {
    let mut pause = SETTLED;
    while stop
        .run_until_cancelled(tokio::time::sleep(pause))
        .await
        .is_some()
    {
        release_binary();
        pause = RELEASE_EVERY;
    }
}

fn release_binary() {
    const PAGE: usize = 4096;
    let (start, end) = (&raw const __executable_start, &raw const etext);
    let from = start.addr().next_multiple_of(PAGE);
    let to = end.addr() / PAGE * PAGE;
    if from < to {
        // SAFETY: up to `etext` a binary has segments that nobody can write to, mapped from its file; dropped pages
        // are read from there again. Relocated data lies behind. What is not mapped is refused, and then all is as
        // before.
        unsafe {
            libc::madvise(
                start.with_addr(from).cast_mut().cast(),
                to - from,
                libc::MADV_DONTNEED,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_constants_survive() {
        const TEXT: &str = "a constant that lies in the binary";
        let before = TEXT.to_owned();
        prepare();
        tidy();
        release_binary();
        assert_eq!(before, std::hint::black_box(TEXT));
        tidy();
    }
}
