//! What `hosts.toml` says, in the forms that containerd takes, and what is refused.

use super::*;

fn parsed(text: &str) -> Result<Vec<Host>, String> {
    let directory = tempfile::tempdir().expect("directory");
    let folder = directory.path().join("reg.example_5000_");
    std::fs::create_dir(&folder).expect("make");
    std::fs::write(folder.join("hosts.toml"), text).expect("write");
    hosts_of("reg.example:5000", &[directory.path().to_owned()]).map_err(|error| {
        let text = error.to_string();
        let file = folder.join("hosts.toml");
        let prefix = format!("invalid registry configuration {}: ", file.display());
        text.strip_prefix(&prefix)
            .unwrap_or_else(|| panic!("{text:?} names the file"))
            .to_owned()
    })
}

fn addresses(text: &str) -> Vec<String> {
    let hosts = parsed(text).expect("a good file");
    hosts
        .iter()
        .map(|host| format!("{}{}", host.address.as_str().trim_end_matches('/'), host.path))
        .collect()
}

#[test]
fn hosts_keep_their_order_and_the_server_is_last() {
    let check = |text: &str, expected: &[&str]| assert_eq!(addresses(text), expected, "{text}");
    let own = "https://reg.example:5000/v2";
    check("", &[own]);
    check("# nothing\n", &[own]);
    check(
        "[host.\"https://z.example\"]\n[host.\"http://a.example:80\"]\n[host.\"https://m.example:443/\"]",
        &[
            "https://z.example/v2",
            "http://a.example/v2",
            "https://m.example/v2",
            own,
        ],
    );
    check(
        "server = \"https://upstream.example/\"\n[host.\"mirror.example:8443\"]",
        &["https://mirror.example:8443/v2", "https://upstream.example/v2"],
    );
    check("server = \"http://10.0.0.1:5000\"", &["http://10.0.0.1:5000/v2"]);
    check(
        "server = \"https://x.example/v2\"\n[host.\"https://y.example/us\"]\n\
         [host.\"https://z.example/v2/proxy/\"]\noverride_path = true\n[host.\"https://w.example\"]\noverride_path = true",
        &[
            "https://y.example/us/v2",
            "https://z.example/v2/proxy",
            "https://w.example",
            "https://x.example/v2",
        ],
    );
    // A table that is there by its header alone is a host, too.
    check(
        "[host.\"https://a.example\".header]\nx-a = \"1\"",
        &["https://a.example/v2", own],
    );
}

#[test]
fn settings_of_a_host() {
    let hosts = parsed(
        r#"
        capabilities = ["pull"]
        skip_verify = true
        [host."https://a.example"]
          capabilities = ["Pull", "push", "referrers"]
          ca = ["/abs/a.pem", "b.pem"]
          client = [["c.cert", "c.key"]]
          dial_timeout = "1m1.5s"
          [host."https://a.example".header]
            X-One = "1"
            x-two = ["2", "3"]
        [host."https://b.example"]
          ca = "b.pem"
          client = "b.pem"
          skip_verify = false
        [host."https://c.example"]
          client = [["c.pem", ""]]
        "#,
    )
    .expect("a good file");
    let [a, b, c, own] = hosts.as_slice() else {
        panic!("{hosts:?}")
    };
    assert!(a.pull && !a.resolve);
    assert_eq!(a.ca[0], Path::new("/abs/a.pem"));
    assert!(a.ca[1].ends_with("reg.example_5000_/b.pem"), "{:?}", a.ca);
    let client = a.client.as_ref().expect("a certificate");
    assert!(client.certificate.ends_with("reg.example_5000_/c.cert"));
    assert!(
        client
            .key
            .as_ref()
            .expect("a key")
            .ends_with("reg.example_5000_/c.key")
    );
    assert_eq!(a.connect_timeout, Duration::from_millis(61_500));
    assert_eq!(a.headers.get("x-one").expect("one"), "1");
    assert_eq!(a.headers.get_all("x-two").iter().count(), 2);
    assert!(a.headers.values().all(HeaderValue::is_sensitive));
    assert_eq!(
        (b.ca.len(), b.skip_verify, b.pull, b.resolve),
        (1, Some(false), true, true)
    );
    assert!(b.client.as_ref().is_some_and(|client| client.key.is_none()));
    assert!(c.client.as_ref().is_some_and(|client| client.key.is_none()));
    // As with containerd, without a server the registry itself does everything.
    assert_eq!((own.skip_verify, own.pull, own.resolve), (Some(true), true, true));
    assert_eq!(own.connect_timeout, CONNECT_TIMEOUT);
}

#[test]
fn what_is_not_understood_is_refused() {
    let check = |text: &str, expected: &str| {
        let error = parsed(text).expect_err(text);
        assert!(error.contains(expected), "{text}: {error}");
    };
    check("server = ", "TOML parse error");
    check("server = 1", "server is not a string");
    check("host = []", "host is not a table");
    check("[[host.\"https://a.example\"]]", "host \"https://a.example\"");
    check("mirror = \"x\"", "unknown field `mirror`");
    check(
        "[host.\"https://a.example\"]\nskip_verfy = true",
        "unknown field `skip_verfy`",
    );
    check(
        "[host.\"https://a.example\"]\nskip_verify = \"yes\"",
        "invalid type",
    );
    check("capabilities = [\"fly\"]", "unknown capability \"fly\"");
    check("ca = 1", "expected a string or an array of strings");
    check("client = [[\"a\"]]", "expected a path");
    check("client = [\"a\", \"b\"]", "more than one client certificate");
    check("dial_timeout = \"soon\"", "dial_timeout \"soon\"");
    check("dial_timeout = \"0s\"", "dial_timeout \"0s\"");
    check("[header]\n\"a b\" = \"x\"", "header \"a b\"");
    check("[header]\na = \"x\\ny\"", "value of header \"a\"");
    check("server = \"httpx://a.example\"", "httpx is not a scheme");
    check("server = \"https://\"", "server \"https://\"");
    check("server = \"https://user:secret@a.example\"", "user or a password");
    check("server = \"https://a.example/?x\"", "query");
    check(&format!("#{}", "x".repeat(1 << 20)), "larger than 1048576 bytes");
    check("server = \"\u{0}", "TOML parse error");
}

#[test]
fn folders_are_named_as_containerd_names_them() {
    let directory = tempfile::tempdir().expect("directory");
    let (first, second) = (directory.path().join("first"), directory.path().join("second"));
    let roots = [first.clone(), second.clone()];
    let host = || {
        let hosts = hosts_of("reg.example:5000", &roots).expect("good files");
        hosts[0].address.host_str().unwrap_or_default().to_owned()
    };
    assert_eq!(host(), "reg.example");
    for folder in [
        second.join("_default"),
        second.join("reg.example:5000"),
        second.join("reg.example_5000_"),
        // The first root goes before the second, whatever it has.
        first.join("_default"),
    ] {
        let name = folder
            .to_string_lossy()
            .replace(|c: char| !c.is_alphanumeric(), "");
        std::fs::create_dir_all(&folder).expect("make");
        std::fs::write(folder.join("hosts.toml"), format!("server = \"https://{name}\"")).expect("write");
        assert_eq!(host(), name.to_lowercase());
    }
    std::fs::create_dir_all(first.join("other.example")).expect("make");
    assert_eq!(
        hosts_of("other.example", &roots).expect("good")[0]
            .address
            .host_str(),
        Some("other.example")
    );
    // What is no folder is an error, too.
    std::fs::write(first.join("file.example"), "").expect("write");
    let error = hosts_of("file.example", &roots).expect_err("a file").to_string();
    assert!(error.contains("file.example/hosts.toml"), "{error}");
}

#[test]
fn certificates_by_dockers_pattern() {
    let directory = tempfile::tempdir().expect("directory");
    let folder = directory.path().join("reg.example");
    std::fs::create_dir(&folder).expect("make");
    for name in ["ca.crt", "other.crt", "me.cert", "me.key", "README"] {
        std::fs::write(folder.join(name), "").expect("write");
    }
    let roots = [directory.path().to_owned()];
    let hosts = hosts_of("reg.example", &roots).expect("good");
    assert_eq!(hosts.len(), 1);
    assert_eq!(hosts[0].ca, [folder.join("ca.crt"), folder.join("other.crt")]);
    let client = hosts[0].client.as_ref().expect("a certificate");
    assert_eq!(client.certificate, folder.join("me.cert"));
    assert_eq!(client.key, Some(folder.join("me.key")));
}

#[test]
fn registries_that_are_not_configured() {
    let check = |registry: &str, address: &str, skip_verify: Option<bool>| {
        let hosts = hosts_of(registry, &[]).expect("a host");
        let host = &hosts[0];
        assert_eq!(host.address.as_str().trim_end_matches('/'), address, "{registry}");
        assert_eq!((hosts.len(), host.skip_verify), (1, skip_verify), "{registry}");
        assert!(!host.is_proxy_of(registry), "{registry}");
    };
    check("docker.io", "https://registry-1.docker.io", None);
    check("reg.example", "https://reg.example", None);
    check("reg.example:443", "https://reg.example", None);
    check("reg.example:80", "https://reg.example:80", None);
    check("localhost:5000", "http://localhost:5000", None);
    check("127.0.0.1:5000", "http://127.0.0.1:5000", None);
    check("localhost:80", "http://localhost", None);
    check("localhost", "https://localhost", Some(true));
    check("127.1.2.3:443", "https://127.1.2.3", Some(true));
    check("10.0.0.1:5000", "https://10.0.0.1:5000", None);
}

#[test]
fn durations() {
    let check = |text: &str, milliseconds: Option<u64>| {
        assert_eq!(duration(text), milliseconds.map(Duration::from_millis), "{text}");
    };
    check("1s", Some(1000));
    check("1.5s", Some(1500));
    check("1h2m3s4ms", Some(3_723_004));
    check("", None);
    check("0", None);
    check("5", None);
    check("-1s", None);
    check("1d", None);
    check("s", None);
    check("1s 2s", None);
    check("99999999999999999999h", None);
}
