//! Disks that pods have as volumes: brought to the machine, formatted if there is nothing on them, mounted once for all pods, and taken away
//! when the last pod is gone. Each is noted on the disk before anything is done for it (`note.rs`), and a new life of the node goes on from there.
//! Sessions and devices that were there before are used, and left alone.

mod fc;
mod format;
pub(super) mod hold;
mod host;
mod iscsi;
mod note;
mod scsi;
mod types;

use fc::FibreChannel;
pub(super) use host::Host;
use iscsi::Chap;
pub(super) use note::Source;
pub(super) use types::{FibreChannelVolume, IscsiVolume};

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::StatVfsMountFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use tokio::sync::OwnedMutexGuard;

use super::claims::FOR_ONE_POD;
use super::volume_type::Ready;
use super::{SetUpError, blocking, csi, is_mount_point, link_device, ownership};
use note::Note;

/// What could not be taken away is tried again after this time, and then less and less often.
const FIRST_RETRY: Duration = Duration::from_secs(10);
const LAST_RETRY: Duration = Duration::from_secs(300);

/// What one pod wants of a disk.
pub(super) struct Request {
    pub uid: String,
    /// The name of the volume, for messages.
    pub name: String,
    pub source: Source,
    pub chap: Chap,
    /// The pod gets the device.
    pub block: bool,
    pub fs_type: String,
    pub options: Vec<String>,
    pub read_only: bool,
    pub for_one_pod: bool,
    pub group: Option<i64>,
    pub change_policy: Option<String>,
    /// The volume in the pod's directory: a mount point, or a link to the device.
    pub target: PathBuf,
    /// Is there when the volume was made to the end.
    pub ready_file: PathBuf,
}

impl Request {
    fn failed(&self, step: &'static str, message: impl ToString) -> SetUpError {
        SetUpError::step(step, &self.name, message.to_string())
    }

    fn ready(&self) -> Ready {
        Ready {
            read_only: self.read_only,
            ..Ready::at(self.target.clone())
        }
    }
}

pub(super) struct Disks {
    /// The kubelet's.
    root: PathBuf,
    host: Arc<Host>,
    /// By their places. What the files say, or are about to. A leaf lock, but for `files`.
    notes: Mutex<BTreeMap<String, Note>>,
    /// One file is written at a time. Taken before `notes`.
    files: Mutex<()>,
    /// One change of a target at a time. A leaf lock.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    retrying: AtomicBool,
}

impl Disks {
    /// Reads what an earlier life of the node has noted. Blocking, for a moment.
    pub fn new(root: &Path, host: Host) -> Arc<Self> {
        let mut notes = note::load(&root.join("disks"), &host.boot);
        for note in notes.values_mut() {
            // The directory of a pod goes after all of its volumes.
            note.users.retain(|uid| root.join("pods").join(uid).exists());
        }
        let disks = Self::with(root, host, notes);
        disks.retry_later();
        disks
    }

    fn with(root: &Path, host: Host, notes: BTreeMap<String, Note>) -> Arc<Self> {
        Arc::new(Disks {
            root: root.to_path_buf(),
            host: Arc::new(host),
            notes: Mutex::new(notes),
            files: Mutex::default(),
            turns: Mutex::default(),
            retrying: AtomicBool::new(false),
        })
    }

    pub fn host(&self) -> &Arc<Host> {
        &self.host
    }

    async fn turn(&self, name: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock();
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(name.to_owned()).or_default().clone()
        };
        turn.lock_owned().await
    }

    /// Changes what is noted of a disk, and has it on the disk before it returns.
    async fn change(self: &Arc<Self>, place: &str, change: impl FnOnce(&mut Note)) -> Result<(), String> {
        if let Some(note) = self.notes.lock().get_mut(place) {
            change(note);
        }
        self.store(place).await
    }

    async fn store(self: &Arc<Self>, place: &str) -> Result<(), String> {
        let (disks, place) = (self.clone(), place.to_owned());
        let stored = blocking(move || {
            let _files = disks.files.lock();
            // As it is now: a caller that gave up must not bring back what was true before.
            let note = disks.notes.lock().get(&place).cloned();
            note::store(&disks.root.join("disks"), &place, note.as_ref())
        });
        stored
            .await
            .map_err(|error| format!("cannot note what is done for a disk: {error}"))
    }

    fn note(&self, place: &str) -> Option<Note> {
        self.notes.lock().get(place).cloned()
    }

    fn global(&self, place: &str) -> PathBuf {
        self.root.join("plugins/kubernetes.io").join(place)
    }

    /// Makes the volume for the pod. Safe to repeat. A caller may give up at any time: what was begun is noted.
    pub async fn set_up(self: &Arc<Self>, request: Request) -> Result<Ready, SetUpError> {
        let block = request.block;
        let steps = match block {
            true => ("MapVolume.WaitForAttach", "MapVolume.SetUpDevice"),
            false => ("MountVolume.WaitForAttach", "MountVolume.SetUp"),
        };
        (request.source.check()).map_err(|error| request.failed(steps.0, error))?;
        let place = request.source.place(block);
        let turn = self.turn(&request.source.lock()).await;
        let known = self.note(&place);
        let users = known.iter().flat_map(|note| &note.users);
        if request.for_one_pod && users.clone().any(|uid| *uid != request.uid) {
            return Err(request.failed(steps.1, FOR_ONE_POD));
        }
        let is_user = users.clone().any(|uid| *uid == request.uid);
        let global = self.global(&place);
        let (target, ready_file, mounted) =
            (request.target.clone(), request.ready_file.clone(), global.clone());
        let looked = blocking(move || {
            let done = !block && ready_file.exists() && is_mount_point(&target)?;
            std::io::Result::Ok((done, !block && is_mount_point(&mounted)?))
        });
        let (done, is_mounted) = looked.await.map_err(|error| request.failed(steps.1, error))?;
        if done && is_user {
            return Ok(request.ready());
        }
        {
            let mut notes = self.notes.lock();
            let note = notes.entry(place.clone()).or_insert_with(|| Note {
                source: request.source.clone(),
                block,
                users: BTreeSet::new(),
                made: Vec::new(),
                appeared: false,
                held: None,
                boot: self.host.boot.clone(),
            });
            note.users.insert(request.uid.clone());
            // Another volume may reach the same disk by more portals.
            note.source = request.source.clone();
        }
        self.store(&place)
            .await
            .map_err(|error| request.failed(steps.0, error))?;
        let device = match is_mounted {
            true => None,
            false => {
                let attached = self.attach(&place, &request.source, &request.chap).await;
                Some(attached.map_err(|error| request.failed(steps.0, error))?)
            }
        };
        // What comes now is not to be stopped half-way: a caller that gives up leaves it to come to its end, and whoever takes the volume
        // away waits for that.
        let disks = self.clone();
        let finished = tokio::spawn(async move {
            let finished = disks.finish(&place, &global, device, &request).await;
            drop(turn);
            finished
        });
        match finished.await {
            Ok(finished) => finished,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }

    /// Brings the disk to the machine. Returns its device.
    async fn attach(self: &Arc<Self>, place: &str, source: &Source, chap: &Chap) -> Result<PathBuf, String> {
        match source {
            Source::Iscsi(target) => iscsi::attach(self, place, target, chap).await,
            Source::Fc(disk) => {
                let (host, wanted) = (self.host.clone(), disk.clone());
                let present = blocking(move || wanted.disks(&host)).await;
                if present.is_empty() {
                    self.change(place, |note| note.appeared = true).await?;
                }
                fc::find(&self.host, disk, present).await
            }
            Source::Local { device, .. } => Ok(device.clone()),
        }
    }

    async fn finish(
        self: &Arc<Self>,
        place: &str,
        global: &Path,
        device: Option<PathBuf>,
        request: &Request,
    ) -> Result<Ready, SetUpError> {
        if let (Some(device), true) = (&device, request.block) {
            return self.hold_and_link(place, device, request).await;
        }
        if let Some(device) = device {
            let folder = global.to_path_buf();
            let made = blocking(move || std::fs::create_dir_all(folder)).await;
            let failed = |error: String| request.failed("MountVolume.MountDevice", error);
            made.map_err(|error| failed(error.to_string()))?;
            let mut options = request.options.clone();
            if request.read_only {
                options.push("ro".to_owned());
            }
            format::format_and_mount(&self.host, &device, global, &request.fs_type, &options)
                .await
                .map_err(failed)?;
        }
        let (global, target, ready_file) = (
            global.to_path_buf(),
            request.target.clone(),
            request.ready_file.clone(),
        );
        let (read_only, group, policy) = (request.read_only, request.group, request.change_policy.clone());
        blocking(move || {
            bind(&global, &target, read_only, group, policy.as_deref())?;
            ready_file.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(&ready_file, b"")
        })
        .await
        .map_err(|error| request.failed("MountVolume.SetUp", error))?;
        Ok(request.ready())
    }

    async fn hold_and_link(
        self: &Arc<Self>,
        place: &str,
        device: &Path,
        request: &Request,
    ) -> Result<Ready, SetUpError> {
        let failed = |error: String| request.failed("MapVolume.AttachFileDevice", error);
        let noted = self.note(place).and_then(|note| note.held);
        let again = noted.as_deref() == Some(device);
        if let Some(other) = noted.filter(|_| !again) {
            // The disk has come back under another name.
            hold::let_go(&self.host, &other).await.map_err(failed)?;
        }
        self.change(place, |note| note.held = Some(device.to_path_buf()))
            .await
            .map_err(failed)?;
        hold::take(&self.host, device, again).await.map_err(failed)?;
        let (device, link) = (device.to_path_buf(), request.target.clone());
        blocking(move || link_device(&device, &link))
            .await
            .map_err(|error| request.failed("MapVolume.MapBlockVolume", error))?;
        Ok(request.ready())
    }

    /// Waits until nothing is being made for the pod any more, which nobody wants now.
    pub async fn settle(&self, uid: &str) {
        for lock in self.locks_of(uid) {
            drop(self.turn(&lock).await);
        }
    }

    fn locks_of(&self, uid: &str) -> BTreeSet<String> {
        let notes = self.notes.lock();
        let used = notes.values().filter(|note| note.users.contains(uid));
        used.map(|note| note.source.lock()).collect()
    }

    /// Nothing of the pod is mounted any more.
    pub async fn pod_is_gone(self: &Arc<Self>, uid: &str) {
        let places: Vec<String> = {
            let mut used = Vec::new();
            for (place, note) in self.notes.lock().iter_mut() {
                if note.users.remove(uid) {
                    used.push(place.clone());
                }
            }
            used
        };
        for place in places {
            let stored = self.store(&place).await;
            if let Err(error) = stored.and(self.detach_if_unused(&place).await) {
                tracing::warn!(error, disk = place, "cannot take a disk away; trying again");
                self.retry_later();
            }
        }
    }

    /// Takes a disk away that no pod has.
    async fn detach_if_unused(self: &Arc<Self>, place: &str) -> Result<(), String> {
        let Some(lock) = self.note(place).map(|note| note.source.lock()) else {
            return Ok(());
        };
        let _turn = self.turn(&lock).await;
        let Some(note) = self.note(place).filter(|note| note.users.is_empty()) else {
            return Ok(());
        };
        if note.block {
            if let Some(device) = &note.held {
                hold::let_go(&self.host, device).await?;
                // A loop device that is still there is somebody else's, also when this is tried again.
                self.change(place, |note| note.held = None).await?;
            }
        } else {
            let global = self.global(place);
            blocking(move || unmount_global(&global))
                .await
                .map_err(|error| format!("failed to unmount {place}: {error}"))?;
        }
        match &note.source {
            Source::Iscsi(target) => iscsi::detach(self, place, target, note.made.clone()).await?,
            Source::Fc(disk) if note.appeared => self.remove_fc(place, disk).await?,
            Source::Fc(_) | Source::Local { .. } => {}
        }
        self.notes.lock().remove(place);
        self.store(place).await
    }

    async fn remove_fc(self: &Arc<Self>, place: &str, disk: &FibreChannel) -> Result<(), String> {
        let same = |note: &Note| matches!(&note.source, Source::Fc(other) if other == disk);
        if let Some(other) = self.another(place, same) {
            return self.change(&other, |note| note.appeared = true).await;
        }
        let (host, wanted) = (self.host.clone(), disk.clone());
        let disks = blocking(move || {
            let mut disks = wanted.disks(&host);
            // A name may lead to the multipath device, and that one may have more paths than were asked for.
            let above: Vec<PathBuf> = disks
                .iter()
                .filter_map(|disk| scsi::multipath_of(&host, disk))
                .collect();
            disks.extend(above.iter().flat_map(|device| scsi::paths_of(&host, device)));
            disks.retain(|disk| !above.contains(disk));
            disks.sort();
            disks.dedup();
            disks
        });
        let disks = disks.await;
        self.remove_devices(place, disks).await
    }

    /// Takes devices from the kernel that nobody has.
    async fn remove_devices(&self, place: &str, disks: Vec<PathBuf>) -> Result<(), String> {
        let above = disks
            .iter()
            .filter_map(|disk| scsi::multipath_of(&self.host, disk));
        let all: Vec<PathBuf> = above.chain(disks.iter().cloned()).collect();
        if let Some(held) = all.iter().find(|device| self.is_held(place, device)) {
            return Err(format!("device {} is still in use", held.display()));
        }
        scsi::remove(&self.host, disks).await
    }

    /// Whether another volume has the device for a pod.
    fn is_held(&self, place: &str, device: &Path) -> bool {
        let holds = |note: &Note| note.held.as_deref() == Some(device);
        self.another(place, holds).is_some()
    }

    /// The place of another disk of which this is true.
    fn another(&self, place: &str, is: impl Fn(&Note) -> bool) -> Option<String> {
        let notes = self.notes.lock();
        let mut others = notes.iter().filter(|(other, _)| *other != place);
        others.find(|(_, note)| is(note)).map(|(other, _)| other.clone())
    }

    /// Looks after disks that nobody uses and that are still there.
    fn retry_later(self: &Arc<Self>) {
        let unused = |disks: &Disks| -> Vec<String> {
            let notes = disks.notes.lock();
            let unused = notes.iter().filter(|(_, note)| note.users.is_empty());
            unused.map(|(place, _)| place.clone()).collect()
        };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        if unused(self).is_empty() || self.retrying.swap(true, Ordering::SeqCst) {
            return;
        }
        let weak = Arc::downgrade(self);
        runtime.spawn(async move {
            let mut pause = FIRST_RETRY;
            loop {
                tokio::time::sleep(pause).await;
                let Some(disks) = weak.upgrade() else { return };
                for place in unused(&disks) {
                    if let Err(error) = disks.detach_if_unused(&place).await {
                        tracing::warn!(error, disk = place, "cannot take a disk away; trying again");
                    }
                }
                // Whoever fails from here on begins anew.
                disks.retrying.store(false, Ordering::SeqCst);
                if unused(&disks).is_empty() || disks.retrying.swap(true, Ordering::SeqCst) {
                    return;
                }
                pause = (pause * 2).min(LAST_RETRY);
            }
        });
    }
}

/// Ends what was done for disks by a node that has stopped, and takes down all that is mounted below its root. Containers are gone by now.
/// What could not be ended stays noted, so that this can be repeated.
pub async fn remove_disks(root: &Path) -> Result<(), String> {
    remove_all(root, Host::default()).await
}

async fn remove_all(root: &Path, host: Host) -> Result<(), String> {
    csi::let_go_of_all(root, &host).await?;
    let mounted = root.to_path_buf();
    let unmounted = blocking(move || skiff_fs::unmount_below(&mounted)).await;
    unmounted.map_err(|error| error.to_string())?;
    let mut notes = note::load(&root.join("disks"), &host.boot);
    notes.values_mut().for_each(|note| note.users.clear());
    let disks = Disks::with(root, host, notes);
    loop {
        let places: Vec<String> = disks.notes.lock().keys().cloned().collect();
        let mut failures = Vec::new();
        for place in &places {
            if let Err(error) = disks.detach_if_unused(place).await {
                failures.push(format!("{place}: {error}"));
            }
        }
        if failures.is_empty() {
            return Ok(());
        }
        // What went may have been in the way of the others.
        if failures.len() == places.len() {
            return Err(failures.join("; "));
        }
    }
}

/// Gives the pod what is mounted, once.
fn bind(
    global: &Path,
    target: &Path,
    read_only: bool,
    group: Option<i64>,
    change_policy: Option<&str>,
) -> std::io::Result<()> {
    if !is_mount_point(target)? {
        std::fs::create_dir_all(target)?;
        mount_bind(global, target)?;
    }
    let finished = (|| {
        if !read_only {
            return ownership::apply(target, group, change_policy, false);
        }
        // A remount sets all flags anew.
        let flags = mount_flags(rustix::fs::statvfs(target)?.f_flag) | MountFlags::RDONLY;
        mount_remount(target, MountFlags::BIND | flags, c"")?;
        Ok(())
    })();
    if finished.is_err() {
        // The next attempt begins anew.
        let _ = unmount(target, UnmountFlags::DETACH);
    }
    finished
}

fn mount_flags(present: StatVfsMountFlags) -> MountFlags {
    let same = [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
        (StatVfsMountFlags::NOATIME, MountFlags::NOATIME),
        (StatVfsMountFlags::NODIRATIME, MountFlags::NODIRATIME),
        (StatVfsMountFlags::RELATIME, MountFlags::RELATIME),
    ];
    let kept = same.iter().filter(|(seen, _)| present.contains(*seen));
    kept.fold(MountFlags::empty(), |flags, (_, flag)| flags | *flag)
}

/// Unmounts a disk that no pod has. One that is in use stays: its device is to be taken away next.
fn unmount_global(global: &Path) -> std::io::Result<()> {
    if is_mount_point(global)? {
        unmount(global, UnmountFlags::NOFOLLOW)?;
    }
    match std::fs::remove_dir(global) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            // Somebody's files, which no mount covers any more.
            tracing::warn!(folder = %global.display(), %error, "leaving the folder of a disk");
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
