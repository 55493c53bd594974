//! A VFS of SQLite between the store and its files: it records what is written and synced, and can fail on demand.
//! It becomes SQLite's default in this process, so that the store under test is opened as always.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::size_of;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, Once};

use rusqlite::ffi;

#[allow(dead_code, reason = "each test uses a part")]
/// What happened, in order. Files are known by their names without the folder.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Create(String),
    Write(String, u64, Vec<u8>),
    Truncate(String, u64),
    Sync(String),
    /// With whether the folder was synced.
    Delete(String, bool),
    /// From here on the file is as long as this, durably: the store makes room past SQLite.
    Extended(String, u64),
    /// A write was acknowledged as this revision.
    Acknowledged(i64),
}

/// The folder whose files are recorded, and what was.
static RECORD: Mutex<Option<(String, Vec<Event>)>> = Mutex::new(None);
/// What writes, truncations and syncs answer; 0: they are made.
static FAILURE: AtomicI32 = AtomicI32::new(ffi::SQLITE_OK);

#[allow(dead_code, reason = "each test uses a part")]
pub fn fail_with(code: c_int) {
    FAILURE.store(code, Ordering::SeqCst);
}

#[allow(dead_code, reason = "each test uses a part")]
pub fn record(folder: &std::path::Path) {
    *RECORD.lock().unwrap() = Some((folder.to_str().unwrap().to_owned(), Vec::new()));
}

pub fn note(event: Event) {
    if let Some((_, events)) = &mut *RECORD.lock().unwrap() {
        events.push(event);
    }
}

#[allow(dead_code, reason = "each test uses a part")]
pub fn recorded() -> Vec<Event> {
    RECORD
        .lock()
        .unwrap()
        .take()
        .map_or(Vec::new(), |(_, events)| events)
}

/// The file's name, if it is recorded.
fn name_of(path: *const c_char) -> Option<String> {
    if path.is_null() {
        return None;
    }
    // SAFETY: SQLite hands out paths that end in a NUL and live for the call.
    let path = unsafe { CStr::from_ptr(path) }.to_str().ok()?;
    let record = RECORD.lock().unwrap();
    let (folder, _) = record.as_ref()?;
    path.strip_prefix(folder.as_str())
        .map(|name| name.trim_start_matches('/').to_owned())
}

/// One open file; the real one lies behind it in the same memory.
#[repr(C)]
struct File {
    base: ffi::sqlite3_file,
    name: *mut String,
}

/// For all below: SQLite calls these with a file that `open` made, in memory of `szOsFile` bytes, and with
/// buffers of the lengths it says. The real methods are called with the real file behind ours.
unsafe fn real(file: *mut ffi::sqlite3_file) -> *mut ffi::sqlite3_file {
    // SAFETY: as said above.
    unsafe { file.cast::<u8>().add(size_of::<File>()).cast() }
}

unsafe fn name(file: *mut ffi::sqlite3_file) -> Option<String> {
    // SAFETY: see `real`.
    unsafe { (*file.cast::<File>()).name.as_ref().cloned() }
}

macro_rules! forward {
    ($file:ident, $method:ident $(, $arg:expr)*) => {
        // SAFETY: see `real`.
        unsafe {
            let real = real($file);
            match (*(*real).pMethods).$method {
                Some(method) => method(real $(, $arg)*),
                None => ffi::SQLITE_NOTFOUND,
            }
        }
    };
}

fn failure() -> Option<c_int> {
    Some(FAILURE.load(Ordering::SeqCst)).filter(|code| *code != ffi::SQLITE_OK)
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    // SAFETY: see `real`; the name was boxed by `open`.
    unsafe {
        let name = (*file.cast::<File>()).name;
        if !name.is_null() {
            drop(Box::from_raw(name));
        }
    }
    forward!(file, xClose)
}

unsafe extern "C" fn read(file: *mut ffi::sqlite3_file, to: *mut c_void, count: c_int, at: i64) -> c_int {
    forward!(file, xRead, to, count, at)
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    from: *const c_void,
    count: c_int,
    at: i64,
) -> c_int {
    // SAFETY: see `real`.
    unsafe {
        if let Some(name) = name(file) {
            if let Some(code) = failure() {
                return code;
            }
            let bytes = std::slice::from_raw_parts(from.cast::<u8>(), count as usize).to_vec();
            note(Event::Write(name, at as u64, bytes));
        }
    }
    forward!(file, xWrite, from, count, at)
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, size: i64) -> c_int {
    // SAFETY: see `real`.
    if let Some(name) = unsafe { name(file) } {
        if let Some(code) = failure() {
            return code;
        }
        note(Event::Truncate(name, size as u64));
    }
    forward!(file, xTruncate, size)
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, flags: c_int) -> c_int {
    // SAFETY: see `real`.
    let name = unsafe { name(file) };
    if name.is_some()
        && let Some(code) = failure()
    {
        return code;
    }
    let code = forward!(file, xSync, flags);
    if let (Some(name), ffi::SQLITE_OK) = (name, code) {
        note(Event::Sync(name));
    }
    code
}

unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, size: *mut i64) -> c_int {
    forward!(file, xFileSize, size)
}

unsafe extern "C" fn lock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    forward!(file, xLock, level)
}

unsafe extern "C" fn unlock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    forward!(file, xUnlock, level)
}

unsafe extern "C" fn reserved(file: *mut ffi::sqlite3_file, found: *mut c_int) -> c_int {
    forward!(file, xCheckReservedLock, found)
}

unsafe extern "C" fn control(file: *mut ffi::sqlite3_file, op: c_int, arg: *mut c_void) -> c_int {
    forward!(file, xFileControl, op, arg)
}

unsafe extern "C" fn sector_size(file: *mut ffi::sqlite3_file) -> c_int {
    forward!(file, xSectorSize)
}

unsafe extern "C" fn characteristics(file: *mut ffi::sqlite3_file) -> c_int {
    forward!(file, xDeviceCharacteristics)
}

/// Version 1: no shared memory and no mappings, which the store needs neither of.
static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(reserved),
    xFileControl: Some(control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

unsafe extern "C" fn open(
    vfs: *mut ffi::sqlite3_vfs,
    path: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out: *mut c_int,
) -> c_int {
    let name = name_of(path);
    let fresh = name.is_some()
        // SAFETY: as above.
        && !std::path::Path::new(unsafe { CStr::from_ptr(path) }.to_str().unwrap_or_default()).exists();
    // SAFETY: see `real`; `pAppData` is the VFS that was the default before.
    unsafe {
        let own = file.cast::<File>();
        (*own).base.pMethods = ptr::null();
        (*own).name = ptr::null_mut();
        let below = (*vfs).pAppData.cast::<ffi::sqlite3_vfs>();
        let Some(open) = (*below).xOpen else {
            return ffi::SQLITE_CANTOPEN;
        };
        let code = open(below, path, real(file), flags, out);
        if code == ffi::SQLITE_OK {
            if let Some(name) = name {
                if fresh {
                    note(Event::Create(name.clone()));
                }
                (*own).name = Box::into_raw(Box::new(name));
            }
            (*own).base.pMethods = &raw const METHODS;
        }
        code
    }
}

unsafe extern "C" fn delete(vfs: *mut ffi::sqlite3_vfs, path: *const c_char, sync_dir: c_int) -> c_int {
    if let Some(name) = name_of(path) {
        note(Event::Delete(name, sync_dir != 0));
    }
    // SAFETY: see `open`.
    unsafe {
        let below = (*vfs).pAppData.cast::<ffi::sqlite3_vfs>();
        (*below)
            .xDelete
            .map_or(ffi::SQLITE_IOERR_DELETE, |delete| delete(below, path, sync_dir))
    }
}

/// Puts it before SQLite's default, once.
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the default VFS lives as long as the process, and so does the leaked copy of it. Its other methods
        // look at no field but `pAppData`, which is why ours forward those that do (`xOpen`, `xDelete`); the rest of the
        // unix VFS takes none.
        unsafe {
            let below = ffi::sqlite3_vfs_find(ptr::null());
            assert!(!below.is_null());
            let mut own = ptr::read(below);
            own.zName = c"recording".as_ptr();
            own.pNext = ptr::null_mut();
            own.pAppData = below.cast();
            own.szOsFile += size_of::<File>() as c_int;
            own.xOpen = Some(open);
            own.xDelete = Some(delete);
            assert_eq!(
                ffi::sqlite3_vfs_register(Box::leak(Box::new(own)), 1),
                ffi::SQLITE_OK
            );
        }
    });
}
