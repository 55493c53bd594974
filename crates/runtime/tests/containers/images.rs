//! Images by archive, by registry, and out of a binary.

use crate::environment::{
    BUSYBOX, Environment, Pod, container_config, gzip, layer, oci_files, sha256, write_archive,
};
use skiff_cri::v1 as cri;
use skiff_runtime::image::{BinaryImage, Error, ImageStore, silent};

pub async fn archives() {
    let directory = tempfile::tempdir().expect("dir");
    let store = ImageStore::open(&directory.path().join("images")).expect("store");
    let plain = layer();
    let path = directory.path().join("image.tar");
    let names = || -> Vec<String> {
        let images = store.list().expect("list");
        images.into_iter().flat_map(|image| image.repo_tags).collect()
    };
    let broken = |what: &str, files: &[(String, Vec<u8>)]| {
        write_archive(&path, files);
        let error = store.import(&path, &silent()).expect_err(what);
        assert!(names().is_empty(), "{what}: nothing is listed");
        assert_eq!(
            std::fs::read_dir(store.layers_directory())
                .expect("layers")
                .count(),
            0,
            "{what}: no layer stays"
        );
        assert_eq!(
            std::fs::read_dir(store.root().join("tmp")).expect("tmp").count(),
            0,
            "{what}: nothing is left"
        );
        error
    };
    let good = oci_files("example.com/a:1", &plain, gzip(&plain));
    assert!(matches!(broken("empty", &[]), Error::Archive(_)));
    assert!(matches!(broken("no index", &good[2..]), Error::Archive(_)));
    let mut files = good.clone();
    files[3].1[100] ^= 1;
    broken("flipped bit in the layer", &files);
    let mut files = good.clone();
    files[2].1.push(b' ');
    assert!(matches!(
        broken("changed configuration", &files),
        Error::Digest { .. }
    ));
    let files: Vec<_> = good
        .iter()
        .filter(|(name, _)| *name != good[3].0)
        .cloned()
        .collect();
    assert!(broken("missing layer", &files).to_string().contains("is missing"));
    // The layer is the manifest's, but not what the configuration says it unpacks to.
    let other = oci_files("example.com/a:1", b"other", gzip(&plain));
    assert!(matches!(broken("wrong diff id", &other), Error::Digest { .. }));
    let mut truncated = std::fs::read({
        write_archive(&path, &good);
        &path
    })
    .expect("read");
    truncated.truncate(truncated.len() / 2);
    std::fs::write(&path, &truncated).expect("write");
    assert!(
        store.import(&path, &silent()).is_err() && names().is_empty(),
        "truncated"
    );

    // Plain, gzip and zstd layers, the archive compressed or not.
    for (index, packed) in [
        plain.clone(),
        gzip(&plain),
        zstd::encode_all(plain.as_slice(), 1).expect("zstd"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("example.com/packed:{index}");
        write_archive(&path, &oci_files(&name, &plain, packed));
        let body = std::fs::read(&path).expect("read");
        let body = if index == 1 { gzip(&body) } else { body };
        std::fs::write(&path, body).expect("write");
        assert_eq!(store.import(&path, &silent()).expect("imports"), [name]);
    }
    assert_eq!(
        std::fs::read_dir(store.layers_directory())
            .expect("layers")
            .count(),
        1,
        "one layer for all"
    );

    // docker save: the configuration is named by its digest, the layer is plain.
    let config = good[2].1.clone();
    let manifest = serde_json::json!([{
        "Config": format!("{}.json", sha256(&config)), "RepoTags": ["docker-saved:2", "docker-saved:latest"],
        "Layers": ["abc/layer.tar"],
    }]);
    let files = [
        (format!("{}.json", sha256(&config)), config),
        ("abc/layer.tar".to_owned(), plain.clone()),
        ("manifest.json".to_owned(), manifest.to_string().into_bytes()),
    ];
    write_archive(&path, &files);
    assert_eq!(
        store.import(&path, &silent()).expect("imports"),
        [
            "docker.io/library/docker-saved:2",
            "docker.io/library/docker-saved:latest"
        ]
    );
    let image = store.find("docker-saved:2").expect("find").expect("there");
    assert_eq!(image.config.cmd, ["sh"]);
    // Same configuration, same image.
    assert_eq!(store.list().expect("list").len(), 1);

    store.lease("holder", &image.layers).expect("lease");
    store.remove(&image.id).expect("removes");
    assert_eq!(
        std::fs::read_dir(store.layers_directory())
            .expect("layers")
            .count(),
        1,
        "held by a lease"
    );
    store.release("holder");
    store.collect_garbage().expect("collects");
    assert_eq!(
        std::fs::read_dir(store.layers_directory())
            .expect("layers")
            .count(),
        0
    );
}

/// A registry with just enough of the protocol, that wants a password and fails once in a while.
async fn serve_registry(
    blobs: std::collections::HashMap<String, Vec<u8>>,
    manifest: Vec<u8>,
) -> std::net::SocketAddr {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let failed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (blobs, manifest, failed) = (blobs.clone(), manifest.clone(), failed.clone());
            tokio::spawn(async move {
                loop {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        match stream.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    let head = String::from_utf8_lossy(&head).into_owned();
                    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                    // user:secret
                    let allowed = head
                        .to_ascii_lowercase()
                        .contains("authorization: basic dxnlcjpzzwnyzxq=");
                    let name = path.rsplit('/').next().unwrap_or_default();
                    let missing = path.contains("/missing/");
                    let (status, kind, body) = if !allowed {
                        (
                            "401 Unauthorized",
                            "application/json",
                            br#"{"errors":[{"code":"UNAUTHORIZED","message":"no"}]}"#.to_vec(),
                        )
                    } else if path == "/v2/" {
                        ("200 OK", "application/json", b"{}".to_vec())
                    } else if path.contains("/manifests/") && !missing {
                        (
                            "200 OK",
                            "application/vnd.oci.image.manifest.v1+json",
                            manifest.clone(),
                        )
                    } else if let Some(blob) = blobs.get(name).filter(|_| !missing) {
                        if !failed.swap(true, std::sync::atomic::Ordering::SeqCst) {
                            ("503 Service Unavailable", "text/plain", b"later".to_vec())
                        } else {
                            ("200 OK", "application/octet-stream", blob.clone())
                        }
                    } else {
                        (
                            "404 Not Found",
                            "application/json",
                            br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no"}]}"#.to_vec(),
                        )
                    };
                    let answer = format!(
                        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
                         WWW-Authenticate: Basic realm=\"test\"\r\n\r\n",
                        body.len()
                    );
                    if stream.write_all(answer.as_bytes()).await.is_err()
                        || stream.write_all(&body).await.is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    address
}

pub async fn pulls() {
    let environment = Environment::new().await;
    let plain = layer();
    let files = oci_files("unused", &plain, gzip(&plain));
    let blobs: std::collections::HashMap<String, Vec<u8>> = files[2..4]
        .iter()
        .map(|(_, body)| (format!("sha256:{}", sha256(body)), body.clone()))
        .collect();
    let manifest = files[4].1.clone();
    let address = serve_registry(blobs.clone(), manifest.clone()).await;
    let mut client = environment.image_client().await;
    // Everything must really be fetched.
    let all = environment.runtime.as_ref().expect("runtime").images();
    all.remove(&all.find(BUSYBOX).expect("find").expect("there").id)
        .expect("remove");

    let pull = |image: String, password: &str| cri::PullImageRequest {
        image: Some(cri::ImageSpec {
            image,
            ..Default::default()
        }),
        auth: (!password.is_empty()).then(|| cri::AuthConfig {
            username: "user".into(),
            password: password.into(),
            ..Default::default()
        }),
        sandbox_config: None,
    };
    let name = format!("{address}/team/web:1");
    let error = client
        .pull_image(pull(name.clone(), "wrong"))
        .await
        .expect_err("refused");
    assert_eq!(error.code(), tonic::Code::Unauthenticated, "{error}");
    let error = client
        .pull_image(pull(format!("{address}/missing/web:1"), "secret"))
        .await
        .expect_err("missing");
    assert_eq!(error.code(), tonic::Code::NotFound, "{error}");
    assert!(error.message().contains("not found"), "{error}");
    let error = client
        .pull_image(pull("Not An Image".into(), ""))
        .await
        .expect_err("invalid");
    assert_eq!(error.code(), tonic::Code::InvalidArgument);
    let error = client
        .pull_image(pull("127.0.0.1:1/a:b".into(), ""))
        .await
        .expect_err("nobody listens");
    assert!(error.message().contains("failed to resolve reference"), "{error}");

    let id = client
        .pull_image(pull(name.clone(), "secret"))
        .await
        .expect("pulls")
        .into_inner()
        .image_ref;
    let request = cri::ImageStatusRequest {
        image: Some(cri::ImageSpec {
            image: name.clone(),
            ..Default::default()
        }),
        verbose: false,
    };
    let image = client
        .image_status(request)
        .await
        .expect("status")
        .into_inner()
        .image
        .expect("there");
    assert_eq!((image.id, image.repo_tags), (id, vec![name.clone()]));
    assert_eq!(
        image.repo_digests,
        [format!("{address}/team/web@sha256:{}", sha256(&manifest))]
    );
    let mut pod = Pod::run(&environment, "pulled").await;
    let mut config = container_config("main", "echo runs");
    config.image = Some(cri::ImageSpec {
        image: image.repo_digests[0].clone(),
        ..Default::default()
    });
    assert_eq!(pod.script(config).await, (0, "runs\n".into()));
    pod.remove().await;

    // A registry that sends something else than its manifest says.
    let mut lying = blobs;
    let layer_digest = format!("sha256:{}", sha256(&files[3].1));
    let body = lying.get_mut(&layer_digest).expect("layer");
    let last = body.len() - 9;
    body[last] ^= 1;
    let address = serve_registry(lying, manifest).await;
    all.remove(&name).expect("remove");
    all.collect_garbage().expect("collect");
    let before = all.list().expect("list").len();
    client
        .pull_image(pull(format!("{address}/team/web:1"), "secret"))
        .await
        .expect_err("digest mismatch");
    assert_eq!(all.list().expect("list").len(), before);
    environment.finish().await;
}

pub async fn binary() {
    let environment = Environment::new().await;
    let store = environment.runtime.as_ref().expect("runtime").images();
    let image = BinaryImage {
        path: "/bin/busybox".into(),
        entrypoint: vec!["/bin/busybox".into()],
        cmd: vec!["echo".into(), "made of one file".into()],
        env: vec!["X=y".into()],
        user: "65532".into(),
        working_dir: "/".into(),
    };
    let executable = std::path::Path::new("/bin/busybox");
    let id = store
        .add_binary_image("skiff.local/demo:1", executable, &image)
        .expect("made");
    assert_eq!(
        store
            .add_binary_image("skiff.local/demo:1", executable, &image)
            .expect("same"),
        id
    );
    let mut pod = Pod::run(&environment, "demo").await;
    let mut config = container_config("main", "");
    config.command.clear();
    config.image = Some(cri::ImageSpec {
        image: "skiff.local/demo:1".into(),
        ..Default::default()
    });
    let id = pod.start(config).await;
    let status = pod.wait(&id).await;
    assert_eq!(
        (status.exit_code, crate::environment::log_text(&status.log_path)),
        (0, "made of one file\n".into())
    );
    assert_eq!(status.user.and_then(|user| user.linux).expect("user").uid, 65532);
    pod.remove().await;
    environment.finish().await;
}

/// Debian's registry on loopback, filled by skopeo.
pub struct RealRegistry {
    child: std::process::Child,
    directory: tempfile::TempDir,
    port: u16,
}

impl Drop for RealRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl RealRegistry {
    /// `None`, and a word about it, where they are not installed.
    pub async fn start() -> Option<RealRegistry> {
        let tools = ["docker-registry", "skopeo"];
        let installed = |tool: &&str| {
            std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
                .any(|path| path.join(tool).exists())
        };
        if !tools.iter().all(installed) {
            println!("docker-registry and skopeo are not installed, nothing is tested");
            return None;
        }
        let directory = tempfile::tempdir().expect("dir");
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .expect("bind")
            .local_addr()
            .expect("address")
            .port();
        let config = directory.path().join("config.yml");
        let text = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            directory.path().join("registry").display()
        );
        std::fs::write(&config, text).expect("config");
        let child = std::process::Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("the registry starts");
        let registry = RealRegistry {
            child,
            directory,
            port,
        };
        crate::environment::eventually("the registry listens", async || {
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok()
        })
        .await;
        Some(registry)
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// An OCI archive, under this name; the full reference.
    pub fn push(&self, archive: &std::path::Path, name: &str) -> String {
        let name = format!("{}/{name}", self.address());
        self.skopeo(
            &format!("oci-archive:{}", archive.display()),
            &format!("docker://{name}"),
        );
        name
    }

    pub fn skopeo(&self, from: &str, to: &str) {
        let output = std::process::Command::new("skopeo")
            .args([
                "copy",
                "--insecure-policy",
                "--dest-tls-verify=false",
                "--src-tls-verify=false",
                "--tmpdir",
            ])
            .arg(self.directory.path())
            .args([from, to])
            .output()
            .expect("skopeo runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

pub async fn real_registry() {
    let Some(registry) = RealRegistry::start().await else {
        return;
    };
    let directory = tempfile::tempdir().expect("dir");
    let plain = layer();
    let archive = directory.path().join("image.tar");
    write_archive(&archive, &oci_files("busybox:latest", &plain, gzip(&plain)));
    let name = registry.push(&archive, "team/web:1");

    let store = std::sync::Arc::new(ImageStore::open(&directory.path().join("images")).expect("store"));
    let progress = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let seen = progress.clone();
    let count: skiff_runtime::image::ProgressFn = std::sync::Arc::new(move |step| {
        if let skiff_runtime::image::Progress::Downloading { done, .. } = step {
            seen.fetch_max(done, std::sync::atomic::Ordering::SeqCst);
        }
    });
    // Twice at the same time: one fetches, the other finds.
    let (first, second) = tokio::join!(store.pull(&name, None, &count), store.pull(&name, None, &count));
    let id = first.expect("pulls");
    assert_eq!(second.expect("pulls"), id);
    assert!(
        progress.load(std::sync::atomic::Ordering::SeqCst) > 100_000,
        "progress is told"
    );
    let missing = store
        .pull(&format!("{}/team/web:2", registry.address()), None, &silent())
        .await;
    assert!(
        matches!(missing, Err(Error::Pull { not_found: true, .. })),
        "{missing:?}"
    );
    let by_digest = store.find(&name).expect("find").expect("there").repo_digests[0].clone();
    assert_eq!(
        store
            .pull(&by_digest, None, &silent())
            .await
            .expect("pulls by digest"),
        id
    );

    // And back through an archive of docker's kind.
    let saved = directory.path().join("saved.tar");
    registry.skopeo(
        &format!("docker://{name}"),
        &format!("docker-archive:{}:saved:3", saved.display()),
    );
    assert_eq!(
        store.import(&saved, &silent()).expect("imports"),
        ["docker.io/library/saved:3"]
    );
}
