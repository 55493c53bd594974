//! Running plugins: the environment and standard input they get, the answers they give, and the order
//! of a chain. It knows no plugin by name.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::conf::is_identifier;
use crate::{AddResult, CniError, Error, Network, Result, cache};

/// A plugin that writes more than this is broken; the rest is dropped.
const MAX_OUTPUT: u64 = 1 << 20;

/// A plugin that takes longer hangs; it is killed.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The longest single wait for a plugin's file that is open for writing; the waits before it add up to as much again.
const BUSY_LIMIT: Duration = Duration::from_secs(3);

/// Which pod a sandbox belongs to; plugins find it in `CNI_ARGS`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodArgs {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// One sandbox on one network.
#[derive(Debug, Clone, Default)]
pub struct Attachment {
    /// Where plugins are searched, in order.
    pub bin_dirs: Vec<PathBuf>,
    /// Where ADD keeps what DEL needs.
    pub cache_dir: PathBuf,
    pub container_id: String,
    /// The sandbox's network namespace; `None` only for DEL, when it is gone already.
    pub netns: Option<PathBuf>,
    pub ifname: String,
    pub pod: PodArgs,
    /// `portMappings`, `bandwidth`, `ipRanges`, `dns`, …: handed to the plugins that declare the
    /// capability.
    pub runtime_config: Map<String, Value>,
}

impl Attachment {
    fn validate(&self, command: Command) -> Result<()> {
        let invalid = |what: String| Err(Error::Invalid(what));
        if !is_identifier(&self.container_id) {
            return invalid(format!("invalid container id {:?}", self.container_id));
        }
        let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
        if self.ifname.is_empty()
            || self.ifname.len() > 15
            || self.ifname == "."
            || self.ifname == ".."
            || self.ifname.contains(bad)
        {
            return invalid(format!("invalid interface name {:?}", self.ifname));
        }
        for (key, value) in self.args() {
            if value.contains([';', '=']) {
                return invalid(format!("{key}: invalid value {value:?}"));
            }
        }
        if self.netns.is_none() && matches!(command, Command::Add | Command::Check) {
            return invalid(format!("{} needs a network namespace", command.name()));
        }
        Ok(())
    }

    fn args(&self) -> [(&'static str, &str); 5] {
        [
            ("IgnoreUnknown", "1"),
            ("K8S_POD_NAMESPACE", &self.pod.namespace),
            ("K8S_POD_NAME", &self.pod.name),
            ("K8S_POD_INFRA_CONTAINER_ID", &self.container_id),
            ("K8S_POD_UID", &self.pod.uid),
        ]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
}

impl Command {
    fn name(self) -> &'static str {
        match self {
            Command::Add => "ADD",
            Command::Del => "DEL",
            Command::Check => "CHECK",
            Command::Gc => "GC",
            Command::Status => "STATUS",
        }
    }
}

impl Network {
    /// Attaches a sandbox: every plugin in order, each given the result of the one before. After an
    /// error the caller must call [`Network::del`], which undoes whatever part was done.
    pub async fn add(&self, attachment: &Attachment) -> Result<AddResult> {
        attachment.validate(Command::Add)?;
        let mut result: Option<Value> = None;
        for plugin in &self.plugins {
            let conf = self.plugin_conf(plugin, &attachment.runtime_config, result.as_ref());
            let kind = plugin_type(plugin);
            let answer = run(Command::Add, kind, &attachment.bin_dirs, Some(attachment), &conf).await?;
            // A plugin in a chain may have nothing to add to what came before it.
            result = match answer {
                Value::Null => result,
                answer => Some(answer),
            };
        }
        let result = result
            .ok_or_else(|| Error::Invalid(format!("network {}: no plugin gave a result", self.name)))?;
        let parsed = AddResult::parse(&result)
            .map_err(|error| Error::Invalid(format!("network {}: result: {error}", self.name)))?;
        cache::store(self, attachment, &result)?;
        Ok(parsed)
    }

    /// Detaches a sandbox: the chain in reverse. Uses the configuration ADD used if it is still known.
    /// A sandbox that is already gone is no error.
    pub async fn del(&self, attachment: &Attachment) -> Result<()> {
        attachment.validate(Command::Del)?;
        let cached = cache::load(&self.name, attachment);
        let then = cached.as_ref().and_then(|cached| cached.network());
        let network = then.as_ref().unwrap_or(self);
        let result = cached
            .as_ref()
            .map(|cached| &cached.result)
            .filter(|_| network.at_least("0.4.0"));
        for plugin in network.plugins.iter().rev() {
            let conf = network.plugin_conf(plugin, &attachment.runtime_config, result);
            run(
                Command::Del,
                plugin_type(plugin),
                &attachment.bin_dirs,
                Some(attachment),
                &conf,
            )
            .await?;
        }
        cache::remove(&self.name, attachment);
        Ok(())
    }

    /// Asks the plugins whether the sandbox still is as ADD left it.
    pub async fn check(&self, attachment: &Attachment) -> Result<()> {
        if self.disable_check || !self.at_least("0.4.0") {
            return Ok(());
        }
        attachment.validate(Command::Check)?;
        let cached = cache::load(&self.name, attachment);
        let Some(result) = cached.as_ref().map(|cached| &cached.result) else {
            return Err(Error::Invalid(format!(
                "container {} was not added to network {}",
                attachment.container_id, self.name
            )));
        };
        for plugin in &self.plugins {
            let conf = self.plugin_conf(plugin, &attachment.runtime_config, Some(result));
            run(
                Command::Check,
                plugin_type(plugin),
                &attachment.bin_dirs,
                Some(attachment),
                &conf,
            )
            .await?;
        }
        Ok(())
    }

    /// Removes what belongs to no sandbox of `valid` (container id and interface name). Cached
    /// attachments are deleted one by one, as every plugin understands; plugins of 1.1 are then asked
    /// to clean up what nobody remembers. Errors do not stop the sweep; the first one is returned.
    pub async fn gc(&self, bin_dirs: &[PathBuf], cache_dir: &Path, valid: &[(String, String)]) -> Result<()> {
        let mut first_error = Ok(());
        for cached in cache::list(&self.name, cache_dir) {
            if valid
                .iter()
                .any(|(id, ifname)| *id == cached.container_id && *ifname == cached.ifname)
            {
                continue;
            }
            let attachment = Attachment {
                bin_dirs: bin_dirs.to_vec(),
                cache_dir: cache_dir.to_path_buf(),
                container_id: cached.container_id.clone(),
                ifname: cached.ifname.clone(),
                ..Attachment::default()
            };
            first_error = first_error.and(self.del(&attachment).await);
        }
        if !self.disable_gc && self.at_least("1.1.0") {
            let valid: Vec<Value> = valid
                .iter()
                .map(|(id, ifname)| json!({"containerID": id, "ifname": ifname}))
                .collect();
            for plugin in &self.plugins {
                let mut conf = self.plugin_conf(plugin, &Map::new(), None);
                conf.insert("cni.dev/valid-attachments".into(), Value::Array(valid.clone()));
                first_error = first_error.and(
                    run(Command::Gc, plugin_type(plugin), bin_dirs, None, &conf)
                        .await
                        .map(drop),
                );
            }
        }
        first_error
    }

    /// Whether the network can take sandboxes. Plugins are asked from 1.1 on; before that it is enough
    /// that they are there.
    pub async fn status(&self, bin_dirs: &[PathBuf]) -> Result<()> {
        for plugin in &self.plugins {
            if self.at_least("1.1.0") {
                let conf = self.plugin_conf(plugin, &Map::new(), None);
                run(Command::Status, plugin_type(plugin), bin_dirs, None, &conf).await?;
            } else {
                find_plugin(plugin_type(plugin), bin_dirs)?;
            }
        }
        Ok(())
    }

    /// A plugin's own configuration with what the protocol adds to it.
    fn plugin_conf(
        &self,
        plugin: &Map<String, Value>,
        runtime_config: &Map<String, Value>,
        previous: Option<&Value>,
    ) -> Map<String, Value> {
        let mut conf = plugin.clone();
        conf.insert("name".into(), self.name.clone().into());
        conf.insert("cniVersion".into(), self.cni_version.clone().into());
        if let Some(Value::Object(capabilities)) = conf.remove("capabilities") {
            let asked: Map<String, Value> = runtime_config
                .iter()
                .filter(|(key, _)| capabilities.get(*key) == Some(&Value::Bool(true)))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect();
            if !asked.is_empty() {
                conf.insert("runtimeConfig".into(), Value::Object(asked));
            }
        }
        if let Some(previous) = previous {
            conf.insert("prevResult".into(), previous.clone());
        }
        conf
    }
}

fn plugin_type(plugin: &Map<String, Value>) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn find_plugin(kind: &str, bin_dirs: &[PathBuf]) -> Result<PathBuf> {
    bin_dirs
        .iter()
        .map(|dir| dir.join(kind))
        .find(|path| path.is_file())
        .ok_or_else(|| Error::PluginNotFound {
            plugin: kind.to_string(),
            path: bin_dirs.to_vec(),
        })
}

async fn run(
    command: Command,
    kind: &str,
    bin_dirs: &[PathBuf],
    attachment: Option<&Attachment>,
    conf: &Map<String, Value>,
) -> Result<Value> {
    let program = find_plugin(kind, bin_dirs)?;
    let exec = |source| Error::Exec {
        plugin: kind.to_string(),
        command: command.name(),
        source,
    };
    let input = serde_json::to_vec(conf).map_err(|error| Error::Invalid(error.to_string()))?;
    let path = std::env::join_paths(bin_dirs).map_err(|error| Error::Invalid(error.to_string()))?;
    let mut process = tokio::process::Command::new(program);
    process
        .env_clear()
        .env(
            "PATH",
            std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into()),
        )
        .env("CNI_COMMAND", command.name())
        .env("CNI_PATH", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A caller that gives up (a CRI deadline) takes the plugin with it.
        .kill_on_drop(true);
    if let Some(attachment) = attachment {
        let args: Vec<String> = attachment
            .args()
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        process
            .env("CNI_CONTAINERID", &attachment.container_id)
            .env("CNI_NETNS", attachment.netns.as_deref().unwrap_or(Path::new("")))
            .env("CNI_IFNAME", &attachment.ifname)
            .env("CNI_ARGS", args.join(";"));
    }
    let mut child = spawn(&mut process).await.map_err(exec)?;
    let stdin = child.stdin.take();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let feed = async {
        if let Some(mut stdin) = stdin {
            // A plugin that answers without reading its configuration closes the pipe; its answer counts.
            let _ = stdin.write_all(&input).await;
        }
    };
    let answered = async { tokio::join!(child.wait(), read_bounded(stdout), read_bounded(stderr), feed) };
    let Ok((status, stdout, stderr, ())) = tokio::time::timeout(TIMEOUT, answered).await else {
        return Err(exec(std::io::ErrorKind::TimedOut.into()));
    };
    let (status, stdout, stderr) = (
        status.map_err(exec)?,
        stdout.map_err(exec)?,
        stderr.map_err(exec)?,
    );
    answer(command, kind, status.success(), &stdout, &stderr)
}

/// Starts a plugin. One that is being copied into place, or whose writer has just forked a child that
/// still holds the file, is busy for a moment: that is no failure of the network.
async fn spawn(process: &mut tokio::process::Command) -> std::io::Result<tokio::process::Child> {
    let mut wait = Duration::from_millis(5);
    loop {
        match process.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy && wait < BUSY_LIMIT => {
                tokio::time::sleep(wait).await;
                wait *= 2;
            }
            done => return done,
        }
    }
}

async fn read_bounded(from: Option<impl tokio::io::AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        (&mut from).take(MAX_OUTPUT).read_to_end(&mut bytes).await?;
        // A pipe that nobody empties would hold the plugin.
        tokio::io::copy(&mut from, &mut tokio::io::sink()).await?;
    }
    Ok(bytes)
}

fn answer(command: Command, kind: &str, success: bool, stdout: &[u8], stderr: &[u8]) -> Result<Value> {
    let failed = |error: CniError| Error::Plugin {
        plugin: kind.to_string(),
        command: command.name(),
        error,
    };
    if !success {
        let error = serde_json::from_slice::<CniError>(stdout).unwrap_or_else(|_| {
            let text = if stdout.is_empty() { stderr } else { stdout };
            let text = String::from_utf8_lossy(text);
            let msg = match text.trim() {
                "" => "netplugin failed with no error message".to_string(),
                text => format!("netplugin failed: {text:?}"),
            };
            CniError::new(CniError::INTERNAL, msg)
        });
        return Err(failed(error));
    }
    if command != Command::Add || stdout.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    serde_json::from_slice(stdout).map_err(|error| {
        failed(CniError::new(
            CniError::DECODING_FAILURE,
            format!("result is not JSON: {error}"),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Fixture {
        dir: tempfile::TempDir,
        attachment: Attachment,
    }

    /// Plugins made of shell that note what they were given and answer as told.
    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let attachment = Attachment {
            bin_dirs: vec![dir.path().join("empty"), dir.path().join("bin")],
            cache_dir: dir.path().join("cache"),
            container_id: "abc".into(),
            netns: Some("/run/netns/x".into()),
            ifname: "eth0".into(),
            pod: PodArgs {
                namespace: "default".into(),
                name: "web".into(),
                uid: "u-1".into(),
            },
            runtime_config: json!({"portMappings":[{"hostPort":80}],"bandwidth":{}})
                .as_object()
                .unwrap()
                .clone(),
        };
        std::fs::create_dir_all(dir.path().join("bin")).unwrap();
        Fixture { dir, attachment }
    }

    impl Fixture {
        fn plugin(&self, name: &str, answer: &str, exit: i32) {
            let path = self.dir.path().join("bin").join(name);
            let log = self.dir.path().join("log");
            std::fs::write(
                &path,
                format!(
                    "#!/bin/sh\nconf=$(cat)\necho \"{name} $CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS\" >> {0}\n\
                     echo \"$conf\" >> {0}\nif [ $CNI_COMMAND = ADD ] || [ {exit} != 0 ]; then echo '{answer}'; fi\nexit {exit}\n",
                    log.display()
                ),
            )
            .unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }

        fn log(&self) -> Vec<String> {
            let text = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            let _ = std::fs::remove_file(self.dir.path().join("log"));
            text.lines().map(str::to_string).collect()
        }

        fn cached_files(&self) -> usize {
            std::fs::read_dir(self.dir.path().join("cache/results"))
                .map(|entries| entries.count())
                .unwrap_or(0)
        }
    }

    fn chain() -> Network {
        Network::from_value(json!({"name":"net","cniVersion":"1.0.0","plugins":[
            {"type":"one","x":1},
            {"type":"two","capabilities":{"portMappings":true}}]}))
        .unwrap()
    }

    #[tokio::test]
    async fn a_chain_there_and_back() {
        let f = fixture();
        f.plugin(
            "one",
            r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/24"}]}"#,
            0,
        );
        f.plugin(
            "two",
            r#"{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.9/24"}]}"#,
            0,
        );
        let result = chain().add(&f.attachment).await.unwrap();
        assert_eq!(
            result.pod_ips(),
            ["10.0.0.9".parse::<std::net::IpAddr>().unwrap()]
        );
        let log = f.log();
        assert_eq!(
            log[0],
            "one ADD abc /run/netns/x eth0 IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;\
             K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=u-1"
        );
        let one: Value = serde_json::from_str(&log[1]).unwrap();
        assert_eq!(one, json!({"type":"one","x":1,"name":"net","cniVersion":"1.0.0"}));
        let two: Value = serde_json::from_str(&log[3]).unwrap();
        assert_eq!(two["runtimeConfig"], json!({"portMappings":[{"hostPort":80}]}));
        assert_eq!(two["prevResult"]["ips"][0]["address"], "10.0.0.2/24");

        chain().check(&f.attachment).await.unwrap();
        assert_eq!(f.log().len(), 4);
        // DEL runs backwards, with the configuration and result of ADD, even if the file has changed.
        let changed =
            Network::from_value(json!({"name":"net","cniVersion":"1.0.0","plugins":[{"type":"one"}]}))
                .unwrap();
        changed
            .del(&Attachment {
                netns: None,
                ..f.attachment.clone()
            })
            .await
            .unwrap();
        let log = f.log();
        assert!(log[0].starts_with("two DEL abc  eth0"), "{}", log[0]);
        assert!(log[2].starts_with("one DEL"));
        let one: Value = serde_json::from_str(&log[3]).unwrap();
        assert_eq!(one["prevResult"]["ips"][0]["address"], "10.0.0.9/24");
        assert_eq!(f.cached_files(), 0);
        assert!(chain().check(&f.attachment).await.is_err());
    }

    #[tokio::test]
    async fn errors_are_the_plugins_own() {
        let f = fixture();
        let network = Network::from_value(json!({"name":"net","cniVersion":"1.0.0","type":"one"})).unwrap();
        let error = |r: Result<AddResult>| r.unwrap_err().to_string();
        assert!(
            error(network.add(&f.attachment).await).starts_with(r#"failed to find plugin "one" in path"#)
        );
        f.plugin(
            "one",
            r#"{"code":11,"msg":"no addresses","details":"subnet is full"}"#,
            1,
        );
        assert_eq!(
            error(network.add(&f.attachment).await),
            r#"plugin type="one" failed (ADD): no addresses; subnet is full"#
        );
        f.plugin("one", "", 1);
        assert!(error(network.add(&f.attachment).await).contains("failed with no error message"));
        f.plugin("one", "not json", 0);
        assert!(error(network.add(&f.attachment).await).contains("result is not JSON"));
        assert_eq!(f.cached_files(), 0);
        for bad in [
            Attachment {
                container_id: "../x".into(),
                ..f.attachment.clone()
            },
            Attachment {
                ifname: "a/b".into(),
                ..f.attachment.clone()
            },
            Attachment {
                ifname: "sixteencharacter".into(),
                ..f.attachment.clone()
            },
            Attachment {
                netns: None,
                ..f.attachment.clone()
            },
            Attachment {
                pod: PodArgs {
                    name: "x;y=z".into(),
                    ..PodArgs::default()
                },
                ..f.attachment.clone()
            },
        ] {
            assert!(
                matches!(network.add(&bad).await, Err(Error::Invalid(_))),
                "{bad:?}"
            );
        }
    }

    #[tokio::test]
    async fn gc_deletes_what_is_not_valid() {
        let f = fixture();
        f.plugin("one", r#"{"cniVersion":"1.1.0"}"#, 0);
        let network = Network::from_value(json!({"name":"net","cniVersion":"1.1.0","type":"one"})).unwrap();
        network.add(&f.attachment).await.unwrap();
        network
            .add(&Attachment {
                container_id: "old".into(),
                ..f.attachment.clone()
            })
            .await
            .unwrap();
        f.log();
        let valid = [("abc".to_string(), "eth0".to_string())];
        network
            .gc(&f.attachment.bin_dirs, &f.attachment.cache_dir, &valid)
            .await
            .unwrap();
        let log = f.log();
        assert!(log[0].starts_with("one DEL old"));
        assert!(log[2].starts_with("one GC"));
        assert!(log[3].contains(r#""cni.dev/valid-attachments":[{"containerID":"abc","ifname":"eth0"}]"#));
        assert_eq!(f.cached_files(), 1);
        network.status(&f.attachment.bin_dirs).await.unwrap();
    }

    #[tokio::test]
    async fn a_plugin_that_never_stops_talking_ends_all_the_same() {
        let f = fixture();
        let path = f.dir.path().join("bin/loud");
        std::fs::write(&path, "#!/bin/sh\nhead -c 3000000 /dev/zero\nexit 1\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let network =
            Network::from_value(json!({"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "loud"}]}))
                .unwrap();
        let error = network.add(&f.attachment).await.unwrap_err();
        assert!(error.to_string().contains("netplugin failed"), "{error:.200}");
    }

    #[tokio::test]
    async fn a_plugin_that_is_being_installed_is_waited_for() {
        let f = fixture();
        f.plugin("one", r#"{"cniVersion":"1.1.0"}"#, 0);
        let writer = std::fs::OpenOptions::new()
            .append(true)
            .open(f.dir.path().join("bin/one"))
            .unwrap();
        let network = Network::from_value(json!({"name":"net","cniVersion":"1.1.0","type":"one"})).unwrap();
        let (added, ()) = tokio::join!(network.add(&f.attachment), async move {
            // The first attempt has been made once this runs: the runtime has one thread.
            drop(writer);
        });
        added.unwrap();
    }
}
