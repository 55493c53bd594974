//! Reads the manifests of static pods: a folder or file that is watched, and a URL that is asked now and then. What
//! cannot be read or is no pod is logged, and the others run.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use k8s_openapi::api::core::v1::Pod;
use rustix::fs::inotify;
use skiff_https::{Call, CallTarget, Client};
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use super::manifest::{self, Origin, Parsed};

/// Upstream's limit for one manifest.
const MAX_MANIFEST: u64 = 10 << 20;
const URL_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_REDIRECTS: usize = 10;
/// A failure of the URL is logged this often; then it is known.
const LOGGED_FAILURES: u32 = 4;

/// What a source has to say: all its pods.
pub type Report = Box<dyn Fn(Vec<Pod>) + Send + Sync>;

/// A folder of manifests, or one manifest.
pub struct Files {
    pub path: PathBuf,
    pub node_name: String,
    pub period: Duration,
}

/// What the files said when they were last read.
#[derive(Default)]
struct Manifests {
    pods: BTreeMap<PathBuf, Pod>,
    /// By path, so that each is logged once.
    problems: BTreeMap<PathBuf, String>,
}

impl Files {
    pub async fn run(self, report: Report, stop: CancellationToken) {
        let mut known = Manifests::default();
        let mut watch = None;
        // A manifest that is being written is unreadable for a moment: its pod is ended only if it stays so.
        let mut keep_unreadable = false;
        loop {
            if watch.is_none() {
                watch = Watch::new(&self.path).ok();
            }
            known = self.read(known, keep_unreadable);
            report(known.pods.values().cloned().collect());
            let events = async {
                match &watch {
                    Some(watch) => watch.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.period) => keep_unreadable = false,
                lives = events => {
                    keep_unreadable = true;
                    if !lives {
                        watch = None;
                    }
                }
            }
        }
    }

    fn read(&self, before: Manifests, keep_unreadable: bool) -> Manifests {
        let mut now = Manifests::default();
        for path in self.manifests(&mut now.problems) {
            let problem = match self.read_one(&path) {
                Ok(parsed) => {
                    note_unknown_fields(&path.display().to_string(), &parsed, before.pods.get(&path));
                    now.pods.insert(path, parsed.pod);
                    continue;
                }
                Err(problem) => problem,
            };
            if let Some(pod) = before.pods.get(&path).filter(|_| keep_unreadable) {
                now.pods.insert(path.clone(), pod.clone());
            }
            now.problems.insert(path, problem);
        }
        for (path, problem) in &now.problems {
            if before.problems.get(path) != Some(problem) {
                tracing::error!(path = %path.display(), problem, "cannot process a manifest of static pods");
            }
        }
        now
    }

    /// The files, in the order of their names. Those that begin with a dot are others'.
    fn manifests(&self, problems: &mut BTreeMap<PathBuf, String>) -> Vec<PathBuf> {
        match std::fs::metadata(&self.path) {
            Ok(found) if found.is_file() => return vec![self.path.clone()],
            Ok(found) if found.is_dir() => {}
            Ok(_) => {
                problems.insert(self.path.clone(), "path is not a directory or file".to_owned());
                return Vec::new();
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                problems.insert(self.path.clone(), "path does not exist, ignoring".to_owned());
                return Vec::new();
            }
            Err(error) => {
                problems.insert(self.path.clone(), error.to_string());
                return Vec::new();
            }
        }
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) => {
                problems.insert(self.path.clone(), error.to_string());
                return Vec::new();
            }
        };
        let mut paths = Vec::new();
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            if name.first() == Some(&b'.') {
                continue;
            }
            match std::fs::metadata(&path) {
                Ok(found) if found.is_file() => paths.push(path),
                Ok(found) if found.is_dir() => {
                    let why = "it is a directory; manifests are not looked for below it";
                    problems.insert(path, why.to_owned());
                }
                Ok(_) => {
                    problems.insert(path, "it is not a file".to_owned());
                }
                Err(error) => {
                    problems.insert(path, error.to_string());
                }
            }
        }
        paths.sort();
        paths
    }

    fn read_one(&self, path: &Path) -> Result<Parsed, String> {
        let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
        let mut data = Vec::new();
        let read = file.take(MAX_MANIFEST + 1).read_to_end(&mut data);
        read.map_err(|error| error.to_string())?;
        if data.len() as u64 > MAX_MANIFEST {
            return Err(format!("it has more than {MAX_MANIFEST} bytes"));
        }
        let location = path.display().to_string();
        let origin = Origin {
            node_name: &self.node_name,
            location: &location,
            is_file: true,
        };
        manifest::pod(&data, &origin).map_err(|error| match error {
            manifest::Error::Unreadable(why) => {
                format!("{location}: couldn't parse as pod({why}), please check config file")
            }
            other => other.to_string(),
        })
    }
}

// COMPAT: upstream ignores them; so does this, but it says so.
fn note_unknown_fields(location: &str, parsed: &Parsed, before: Option<&Pod>) {
    let is_known = before.is_some_and(|before| before.metadata.uid == parsed.pod.metadata.uid);
    if !is_known && !parsed.unknown_fields.is_empty() {
        let fields = parsed.unknown_fields.join(", ");
        tracing::warn!(location, fields, "a manifest has fields that are ignored");
    }
}

/// Tells when something in a folder, or a file, changes.
struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    fn new(path: &Path) -> std::io::Result<Watch> {
        use inotify::WatchFlags as On;
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let fd = inotify::init(flags)?;
        let changes = On::CLOSE_WRITE | On::MOVED_TO | On::MOVED_FROM | On::DELETE | On::CREATE;
        let ends = On::DELETE_SELF | On::MOVE_SELF;
        inotify::add_watch(&fd, path, changes | ends)?;
        // SAFETY: the AsyncFd owns the descriptor, and nobody else has it.
        let fd = unsafe { AsyncFd::register(fd) };
        Ok(Watch(fd.map_err(|error| error.into_parts().1)?))
    }

    /// Waits for a change. `false`: what was watched is gone.
    async fn changed(&self) -> bool {
        use inotify::ReadFlags as Seen;
        let Ok(mut ready) = self.0.readable().await else {
            return false;
        };
        let mut space = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(self.0.get_ref(), &mut space);
        let mut lives = true;
        loop {
            match events.next() {
                Ok(event) => {
                    let gone = Seen::DELETE_SELF | Seen::MOVE_SELF | Seen::IGNORED | Seen::UNMOUNT;
                    lives &= !event.events().intersects(gone);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    ready.clear_ready();
                    return lives;
                }
                Err(_) => return false,
            }
        }
    }
}

/// A manifest behind a URL.
pub struct Url {
    pub url: String,
    pub headers: HeaderMap,
    pub node_name: String,
    pub period: Duration,
}

impl Url {
    pub async fn run(self, report: Report, stop: CancellationToken) {
        let client = Client::new(skiff_https::trusting(None));
        let mut last = Bytes::new();
        let mut failures = 0u32;
        loop {
            match self
                .fetch(&client)
                .await
                .and_then(|data| self.pods(data, &mut last))
            {
                Ok(pods) => {
                    if failures > 0 {
                        tracing::info!(url = self.url, "read the static pods again");
                    }
                    failures = 0;
                    if let Some(pods) = pods {
                        report(pods);
                    }
                }
                Err(why) => {
                    failures = failures.saturating_add(1);
                    if failures <= LOGGED_FAILURES {
                        tracing::warn!(url = self.url, why, "cannot read static pods from the URL");
                    }
                    if why.starts_with(EMPTY) {
                        report(Vec::new());
                    }
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.period) => {}
            }
        }
    }

    async fn fetch(&self, client: &Client) -> Result<Bytes, String> {
        let mut url = self.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let place = CallTarget::of(&url)?;
            let call = Call {
                method: Method::GET,
                place: &place,
                headers: &self.headers,
                body: Bytes::new(),
                timeout: URL_TIMEOUT,
                limit: usize::try_from(MAX_MANIFEST).unwrap_or(usize::MAX),
            };
            let answer = client.call(call).await.map_err(|error| error.to_string())?;
            match (answer.code, answer.location) {
                (200, _) => return Ok(answer.body),
                // The headers may be secrets: they go to no other host.
                (300..=399, Some(next)) => {
                    let next = absolute(&url, &next);
                    if CallTarget::of(&next)?.address != place.address {
                        return Err(format!("{url}: redirected to another host, {next}"));
                    }
                    url = next;
                }
                (code, _) => return Err(format!("{url}: status {code}")),
            }
        }
        Err(format!("{}: stopped after {MAX_REDIRECTS} redirects", self.url))
    }

    /// `None`: what it said the last time.
    fn pods(&self, data: Bytes, last: &mut Bytes) -> Result<Option<Vec<Pod>>, String> {
        if data.is_empty() {
            *last = data;
            return Err(format!("{EMPTY} {}", self.url));
        }
        if data == *last {
            return Ok(None);
        }
        last.clone_from(&data);
        let origin = Origin {
            node_name: &self.node_name,
            location: &self.url,
            is_file: false,
        };
        let parsed = manifest::pods(&data, &origin).map_err(|error| error.to_string())?;
        for one in &parsed {
            note_unknown_fields(&self.url, one, None);
        }
        Ok(Some(parsed.into_iter().map(|one| one.pod).collect()))
    }
}

const EMPTY: &str = "zero-length data received from";

fn absolute(base: &str, location: &str) -> String {
    if !location.starts_with('/') {
        return location.to_owned();
    }
    let uri: Option<http::Uri> = base.parse().ok();
    match uri
        .as_ref()
        .and_then(|uri| Some((uri.scheme_str()?, uri.authority()?)))
    {
        Some((scheme, authority)) => format!("{scheme}://{authority}{location}"),
        None => location.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: NAME}\nspec: {containers: [{name: c, image: i}]}\n";

    fn names(read: &Manifests) -> Vec<String> {
        read.pods
            .values()
            .filter_map(|pod| pod.metadata.name.clone())
            .collect()
    }

    #[test]
    fn a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files {
            path: dir.path().to_owned(),
            node_name: "n".to_owned(),
            period: Duration::from_secs(20),
        };
        let write = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
        write("b.yaml", &POD.replace("NAME", "b"));
        write("a.json", &POD.replace("NAME", "a"));
        write(".hidden.yaml", &POD.replace("NAME", "hidden"));
        write("bad.yaml", "kind: [");
        std::fs::create_dir(dir.path().join("below")).unwrap();
        let read = files.read(Manifests::default(), false);
        assert_eq!(names(&read), ["a-n", "b-n"]);
        let problems: Vec<_> = read.problems.keys().map(|p| p.file_name().unwrap()).collect();
        assert_eq!(problems, ["bad.yaml", "below"]);
        // What is being written stays; what stays unreadable goes.
        write("b.yaml", "kind:");
        let read = files.read(read, true);
        assert_eq!(names(&read), ["a-n", "b-n"]);
        assert_eq!(names(&files.read(read, false)), ["a-n"]);
        let absent = Files {
            path: dir.path().join("absent"),
            ..files
        };
        assert!(absent.read(Manifests::default(), false).pods.is_empty());
    }

    #[tokio::test]
    async fn a_change_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let watch = Watch::new(dir.path()).unwrap();
        std::fs::write(dir.path().join("a"), "x").unwrap();
        assert!(watch.changed().await);
        std::fs::remove_file(dir.path().join("a")).unwrap();
        assert!(watch.changed().await);
        drop(dir);
        while watch.changed().await {}
    }

    #[test]
    fn redirects() {
        assert_eq!(absolute("http://a:1/x?y", "/z"), "http://a:1/z");
        assert_eq!(absolute("http://a:1/x", "http://b/"), "http://b/");
    }
}
