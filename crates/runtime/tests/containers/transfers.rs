//! Downloads that break off, images out of a container engine, platforms, and archives with several names.

use crate::environment::{gzip, layer, oci_files, sha256, write_archive};
use crate::fake::{Content, Fake, Seen, answer, engine};
use skiff_runtime::image::{EngineSocket, ImageStore, Limits, Progress, ProgressFn, silent};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn store(directory: &Path) -> ImageStore {
    let store = ImageStore::open(&directory.join("images")).expect("store");
    store.with_registry_configs(Vec::new())
}

/// What a server makes of a range.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ranges {
    Honoured,
    Ignored,
    /// The answer says that it begins elsewhere.
    Shifted,
    /// The answer says what it should, and holds other bytes.
    Wrong,
    Refused,
}

/// Serves the layer in `pieces`, each on a connection that breaks off, and the last one whole.
async fn breaking(content: &Content, ranges: Ranges, pieces: usize, says_length: bool) -> Fake {
    let content = content.clone();
    let times = AtomicUsize::new(0);
    Fake::start(move |seen| {
        if !seen.path.ends_with(&content.layer_digest) {
            return content.serve(seen);
        }
        let mut ranged = seen.clone();
        if ranges == Ranges::Ignored {
            ranged.headers.remove("range");
        }
        let mut said = match (seen.header("range"), ranges) {
            ("", _) | (_, Ranges::Honoured | Ranges::Ignored) => content.serve(&ranged),
            (_, Ranges::Shifted) => answer(206, &content.layer[7..]).with("Content-Range", "bytes 7-8/9"),
            (_, Ranges::Refused) => answer(416, "no"),
            (_, Ranges::Wrong) => {
                let mut said = content.serve(seen);
                said.body.iter_mut().for_each(|byte| *byte ^= 1);
                said
            }
        };
        said.says_length = says_length;
        if times.fetch_add(1, Ordering::SeqCst) < pieces {
            said.cut = Some(content.layer.len() / (pieces + 1));
        }
        said
    })
    .await
}

fn ranges_of(fake: &Fake, content: &Content) -> Vec<String> {
    let seen: Vec<Seen> = fake.take();
    seen.iter()
        .filter(|seen| seen.path.ends_with(&content.layer_digest))
        .map(|seen| seen.header("range").to_owned())
        .collect()
}

pub async fn resumed() {
    let content = Content::new();
    let piece = |pieces: usize, at: usize| format!("bytes={}-", content.layer.len() / (pieces + 1) * at);
    for (ranges, pieces, says_length, expected) in [
        (Ranges::Honoured, 1, true, vec![String::new(), piece(1, 1)]),
        // The end of the connection is the end of the body, and still too early.
        (Ranges::Honoured, 1, false, vec![String::new(), piece(1, 1)]),
        // As long as something comes, it goes on: more often than it would begin anew.
        (
            Ranges::Honoured,
            6,
            true,
            (0..7)
                .map(|at| if at == 0 { String::new() } else { piece(6, at) })
                .collect(),
        ),
        (Ranges::Ignored, 1, true, vec![String::new(), piece(1, 1)]),
        (
            Ranges::Ignored,
            2,
            false,
            vec![String::new(), piece(2, 1), piece(2, 1)],
        ),
        (
            Ranges::Shifted,
            1,
            true,
            vec![String::new(), piece(1, 1), String::new()],
        ),
        (
            Ranges::Refused,
            1,
            true,
            vec![String::new(), piece(1, 1), String::new()],
        ),
    ] {
        let directory = tempfile::tempdir().expect("directory");
        let store = Arc::new(store(directory.path()));
        let fake = breaking(&content, ranges, pieces, says_length).await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = seen.clone();
        let progress: ProgressFn = Arc::new(move |progress| match progress {
            Progress::Needed { layers, bytes } => noted.lock().expect("lock").push((layers as u64, bytes)),
            Progress::Downloading { done, total, .. } => noted.lock().expect("lock").push((done, total)),
            _ => {}
        });
        let pulled = store
            .pull(&format!("{}/web:1", fake.address), None, &progress)
            .await;
        pulled.unwrap_or_else(|error| panic!("{ranges:?} {pieces}: {error}"));
        assert_eq!(ranges_of(&fake, &content), expected, "{ranges:?} {pieces}");
        let size = content.layer.len() as u64;
        let seen = seen.lock().expect("lock");
        assert_eq!((seen[0], *seen.last().expect("some")), ((1, size), (size, size)));
    }

    // The bytes of both parts make the digest.
    let directory = tempfile::tempdir().expect("directory");
    let store = Arc::new(store(directory.path()));
    let fake = breaking(&content, Ranges::Wrong, 1, true).await;
    let error = store
        .pull(&format!("{}/web:1", fake.address), None, &silent())
        .await;
    let error = error.expect_err("another layer").to_string();
    assert!(error.contains("layer"), "{error}");
    assert_eq!(ranges_of(&fake, &content).len(), 2);

    // One that never gets anywhere is given up, whether or not it knows ranges.
    for ranges in [Ranges::Honoured, Ranges::Ignored] {
        let (served, size, attempts) = (content.clone(), content.layer.len(), AtomicUsize::new(0));
        let fake = Fake::start(move |seen| {
            let mut seen = seen.clone();
            let is_layer = seen.path.ends_with(&served.layer_digest);
            if ranges == Ranges::Ignored {
                seen.headers.remove("range");
            }
            let mut said = served.serve(&seen);
            if is_layer {
                // Whoever begins anew gets further each time, and yet not ahead.
                let eighths = attempts.fetch_add(1, Ordering::SeqCst) + 1;
                said.cut = Some(if ranges == Ranges::Ignored {
                    size / 8 * eighths
                } else {
                    0
                });
            }
            said
        })
        .await;
        let error = store
            .pull(&format!("{}/web:1", fake.address), None, &silent())
            .await;
        error.expect_err("nothing comes");
        assert_eq!(ranges_of(&fake, &content).len(), 4, "{ranges:?}");
    }
    let left = std::fs::read_dir(store.root().join("tmp")).expect("list").count();
    assert_eq!((left, store.list().expect("list").len()), (0, 0));
}

/// Against Debian's registry, behind a line that breaks in the middle of each large answer.
pub async fn resumed_from_a_real_registry() {
    let Some(registry) = crate::images::RealRegistry::start().await else {
        return;
    };
    let directory = tempfile::tempdir().expect("directory");
    let plain = layer();
    let packed = gzip(&plain);
    let half = packed.len() / 2 + 4096;
    let archive = directory.path().join("image.tar");
    write_archive(&archive, &oci_files("busybox:latest", &plain, packed));
    registry.push(&archive, "team/web:1");

    let line = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = line.local_addr().expect("address");
    let (target, broken) = (registry.address(), Arc::new(AtomicUsize::new(0)));
    let counted = broken.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = line.accept().await {
            let (target, broken) = (target.clone(), counted.clone());
            tokio::spawn(async move {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let server = tokio::net::TcpStream::connect(target)
                    .await
                    .expect("the registry");
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let asking = tokio::spawn(async move {
                    let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
                });
                let mut buffer = vec![0; 4096];
                let mut left = half;
                while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
                    let length = length.min(left);
                    if to_client.write_all(&buffer[..length]).await.is_err() {
                        break;
                    }
                    left -= length;
                    if left == 0 {
                        broken.fetch_add(1, Ordering::SeqCst);
                        break;
                    }
                }
                asking.abort();
            });
        }
    });
    // The image's registry is one that nobody reaches but by its configuration.
    let certs = directory.path().join("certs.d");
    std::fs::create_dir_all(certs.join("reg.example")).expect("make");
    let text = format!("server = \"http://{address}\"");
    std::fs::write(certs.join("reg.example/hosts.toml"), text).expect("write");
    let store = Arc::new(store(directory.path()).with_registry_configs(vec![certs]));
    store
        .pull("reg.example/team/web:1", None, &silent())
        .await
        .expect("pulls");
    assert_eq!(broken.load(Ordering::SeqCst), 1, "the second half came alone");
    let image = store
        .find("reg.example/team/web:1")
        .expect("find")
        .expect("there");
    assert_eq!(image.config.cmd, ["sh"]);
}

/// `docker save` of an image with these names.
fn saved(tags: &[&str]) -> Vec<u8> {
    let plain = layer();
    let files = oci_files("unused", &plain, gzip(&plain));
    let config = files[2].1.clone();
    let name = format!("{}.json", sha256(&config));
    let tags = (!tags.is_empty()).then_some(tags);
    let manifest = serde_json::json!([{"Config": name, "RepoTags": tags, "Layers": ["layer.tar"]}]);
    let mut builder = tar::Builder::new(Vec::new());
    for (name, body) in [
        (name, config),
        ("layer.tar".to_owned(), plain),
        ("manifest.json".to_owned(), manifest.to_string().into_bytes()),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(body.len() as u64);
        builder
            .append_data(&mut header, name, body.as_slice())
            .expect("entry");
    }
    builder.into_inner().expect("archive")
}

pub async fn loaded() {
    let directory = tempfile::tempdir().expect("directory");
    let store = Arc::new(store(directory.path()));
    let socket = directory.path().join("docker.sock");
    let (named, unnamed) = (saved(&["web:1", "localhost/web:latest"]), saved(&[]));
    engine(&socket, move |seen| {
        let mut said = match seen.path.as_str() {
            "/images/team/web:1/get" => answer(200, named.clone()),
            "/images/sha256:abc/get" => answer(200, unnamed.clone()),
            "/images/cut/get" => answer(200, named.clone()),
            "/images/zeros/get" => answer(200, vec![0; 64 << 20]),
            "/images/broken/get" => answer(500, r#"{"message": "disk\nfailure"}"#),
            _ => answer(404, r#"{"message": "No such image"}"#),
        };
        said.says_length = seen.path != "/images/team/web:1/get";
        said.cut = (seen.path == "/images/cut/get").then_some(named.len() / 2);
        said
    });
    let engine = EngineSocket::parse(&format!("unix://{}", socket.display())).expect("a socket");
    let load = async |name: &str| {
        let loaded = store.load(name, &engine, &silent()).await;
        loaded.map_err(|error| error.to_string())
    };
    let names = load("team/web:1").await.expect("loads");
    assert_eq!(names, ["docker.io/library/web:1", "localhost/web:latest"]);
    let image = store.find("localhost/web").expect("find").expect("there");
    assert_eq!(
        (image.config.cmd.as_slice(), image.repo_tags.len()),
        (&["sh".to_owned()][..], 2)
    );
    store.remove(&image.id).expect("remove");
    assert_eq!(
        load("sha256:abc").await.expect("loads"),
        std::slice::from_ref(&image.id)
    );
    store.remove(&image.id).expect("remove");

    for (name, expected) in [
        ("cut", ""),
        ("zeros", "it holds neither index.json"),
        ("broken", "500"),
        ("missing", "image \"missing\" not found"),
        ("../../containers/json?x", "invalid reference format"),
        ("a/../b", "invalid reference format"),
        ("", "invalid reference format"),
    ] {
        let error = load(name).await.expect_err(name);
        assert!(error.contains(expected), "{name}: {error}");
    }
    let error = load("broken").await.expect_err("broken");
    assert!(
        error.ends_with("diskfailure") && error.contains("docker.sock"),
        "{error}"
    );
    let gone = EngineSocket::parse("unix:///nowhere/docker.sock").expect("a socket");
    let error = store
        .load("web", &gone, &silent())
        .await
        .expect_err("nobody")
        .to_string();
    assert!(
        error.contains("/nowhere/docker.sock: No such file") && error.contains("--host"),
        "{error}"
    );

    // The limits are those of an import.
    let small = Limits {
        unpacked_bytes: 1 << 16,
        ..Limits::default()
    };
    let small = Arc::new(
        ImageStore::open(&directory.path().join("images"))
            .expect("store")
            .with_limits(small),
    );
    let error = small
        .load("team/web:1", &engine, &silent())
        .await
        .expect_err("too large");
    assert!(error.to_string().contains("larger than 65536 bytes"), "{error}");
    for folder in ["tmp", "layers"] {
        let left = std::fs::read_dir(store.root().join(folder))
            .expect("list")
            .count();
        assert_eq!((left, store.list().expect("list").len()), (0, 0), "{folder}");
    }
}

pub async fn platforms() {
    let directory = tempfile::tempdir().expect("directory");
    let mut content = Content::new();
    let mut entries = Vec::new();
    // Images that differ in their configurations.
    for (architecture, variant) in [("amd64", ""), ("arm64", "v8"), ("arm", "v6"), ("arm", "v7")] {
        let mut manifest: serde_json::Value = serde_json::from_slice(&content.manifest).expect("manifest");
        let digest = manifest["config"]["digest"].as_str().expect("digest").to_owned();
        let mut config: serde_json::Value = serde_json::from_slice(&content.blobs[&digest]).expect("config");
        config["config"]["Cmd"] = serde_json::json!([format!("{architecture}{variant}")]);
        let mut keep = |body: Vec<u8>| {
            let (digest, size) = (format!("sha256:{}", sha256(&body)), body.len());
            content.blobs.insert(digest.clone(), body);
            (digest, size)
        };
        let (digest, size) = keep(config.to_string().into_bytes());
        manifest["config"]["digest"] = digest.into();
        manifest["config"]["size"] = size.into();
        let (digest, size) = keep(manifest.to_string().into_bytes());
        entries.push(serde_json::json!({"digest": digest, "size": size,
            "platform": {"os": "linux", "architecture": architecture, "variant": variant}}));
    }
    let index = serde_json::json!({"schemaVersion": 2, "manifests": entries}).to_string();
    content.manifest = index.clone().into_bytes();
    let fake = content.registry().await;
    let name = format!("{}/web:1", fake.address);
    let archive = directory.path().join("web.tar");
    let mut files = vec![("index.json".to_owned(), index.into_bytes())];
    for (digest, body) in &content.blobs {
        files.push((format!("blobs/{}", digest.replace(':', "/")), body.clone()));
    }
    write_archive(&archive, &files);
    for (platform, expected) in [
        ("linux/amd64", Some("amd64")),
        ("linux/arm64", Some("arm64v8")),
        ("linux/arm", Some("armv7")),
        ("linux/arm/v6", Some("armv6")),
        ("linux/riscv64", None),
    ] {
        let store = Arc::new(store(directory.path()).with_platform(platform.parse().expect("a platform")));
        let pulled = store.pull(&name, None, &silent()).await;
        let imported = store.import(&archive, &silent());
        let Some(expected) = expected else {
            let error = pulled.expect_err("no such platform").to_string();
            assert!(
                error.contains("no match for platform in manifest: linux/riscv64"),
                "{error}"
            );
            let error = imported.expect_err("no such platform").to_string();
            assert!(error.contains("no image for linux/riscv64"), "{error}");
            continue;
        };
        let id = pulled.expect("pulls");
        assert_eq!(imported.expect("imports"), ["docker.io/library/web:latest"]);
        for reference in [&name, "web", &id] {
            let image = store.find(reference).expect("find").expect("there");
            assert_eq!(image.config.cmd, [expected], "{platform} {reference}");
        }
    }
}

/// All names of an archive, in whichever of its lists they are.
pub async fn names_of_archives() {
    let directory = tempfile::tempdir().expect("directory");
    let store = store(directory.path());
    let archive = directory.path().join("saved.tar");
    let plain = layer();
    let files = oci_files("unused", &plain, gzip(&plain));
    let index: serde_json::Value = serde_json::from_slice(&files[1].1).expect("index");
    let check = |annotations: &[&[(&str, &str)]], docker: Option<Option<&[&str]>>, expected: &[&str]| {
        let mut index = index.clone();
        let entries = annotations.iter().map(|annotations| {
            let mut entry = index["manifests"][0].clone();
            entry["annotations"] = annotations.iter().copied().collect::<serde_json::Value>();
            entry
        });
        index["manifests"] = entries.collect();
        let mut files = files.clone();
        files[1].1 = index.to_string().into_bytes();
        if let Some(tags) = docker {
            let manifest =
                serde_json::json!([{"Config": files[2].0, "RepoTags": tags, "Layers": [files[3].0]}]);
            files.push(("manifest.json".into(), manifest.to_string().into_bytes()));
        }
        write_archive(&archive, &files);
        let imported = store.import(&archive, &silent()).expect("imports");
        let image = store.list().expect("list").remove(0);
        let expected: Vec<String> = match expected {
            [] => vec![image.id.clone()],
            expected => expected.iter().map(ToString::to_string).collect(),
        };
        assert_eq!(imported, expected, "{annotations:?} {docker:?}");
        for name in &imported {
            let found = store.find(name).expect("find").expect("there");
            assert_eq!(found.id, image.id);
            let repository = name.rsplit_once(':').expect("a tag").0;
            assert!(
                name == &image.id
                    || found
                        .repo_digests
                        .iter()
                        .any(|digest| digest.starts_with(&format!("{repository}@"))),
                "{name}: {:?}",
                found.repo_digests
            );
        }
        store.remove(&image.id).expect("remove");
    };
    const NAME: &str = "io.containerd.image.name";
    let (web, two) = ("docker.io/library/web:1", "reg.example/other:2");
    // As docker writes it since version 25, and as its first releases did.
    check(
        &[&[(NAME, web)], &[(NAME, two)]],
        Some(Some(&["web:1", "reg.example/other:2"])),
        &[web, two],
    );
    check(&[&[]], Some(Some(&["web:1", "reg.example/other:2"])), &[web, two]);
    check(
        &[&[], &[]],
        Some(Some(&["web:1", "reg.example/other:2"])),
        &[web, two],
    );
    check(&[&[]], Some(None), &[]);
    // Other tools.
    check(&[&[(NAME, web)]], None, &[web]);
    check(
        &[&[("org.opencontainers.image.ref.name", "3")]],
        None,
        &["docker.io/library/saved:3"],
    );
    check(&[&[]], None, &["docker.io/library/saved:latest"]);
}
