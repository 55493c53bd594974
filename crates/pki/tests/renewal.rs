//! Certificates are renewed by a clock that the test drives: near their end, and after a clock that was wrong.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustls::pki_types::UnixTime;
use skiff_pki::{CertificateFacts, ClientAuthority, Clock, LiveIdentity, Pki, Renewer};

const DAY: u64 = 24 * 3600;
const Y2026: u64 = 1_780_000_000;
const Y2099: u64 = 4_080_000_000;

#[derive(Clone)]
struct TestClock(Arc<AtomicU64>);

impl TestClock {
    fn at(seconds: u64) -> TestClock {
        TestClock(Arc::new(AtomicU64::new(seconds)))
    }

    fn set(&self, seconds: u64) {
        self.0.store(seconds, Ordering::SeqCst);
    }

    fn clock(&self) -> Clock {
        let now = self.0.clone();
        Arc::new(move || SystemTime::UNIX_EPOCH + Duration::from_secs(now.load(Ordering::SeqCst)))
    }
}

fn verifies(ca: &str, certificate: &str, at: u64) -> bool {
    let at = UnixTime::since_unix_epoch(Duration::from_secs(at));
    let chain = skiff_pki::chain(certificate).expect("a chain");
    ClientAuthority::new(ca)
        .expect("an authority")
        .verify(&chain, at)
        .is_ok()
}

fn facts(pem: &str) -> CertificateFacts {
    CertificateFacts::parse(pem).expect("a certificate")
}

/// A running server's: the admin's certificate and the front proxy's.
fn running(dir: &Path, clock: &TestClock) -> (Renewer, Vec<Arc<LiveIdentity>>) {
    let pki = Pki::open_at(dir, clock.clock()).expect("keys");
    let admin = pki
        .client("admin", "kubernetes-admin", Some("system:masters"))
        .expect("a certificate");
    let hosts = ["localhost".to_owned(), "10.0.0.1".to_owned(), "::1".to_owned()];
    let serving = pki
        .serving("apiserver", "kube-apiserver", &hosts)
        .expect("a certificate");
    let lives = vec![
        LiveIdentity::new("admin", admin).expect("an identity"),
        LiveIdentity::new("apiserver", serving).expect("an identity"),
        pki.front_proxy().expect("a front proxy").live,
    ];
    (Renewer::new(pki, lives.clone()), lives)
}

#[test]
fn a_running_server_renews_in_time_and_not_before() {
    let dir = tempfile::tempdir().expect("a folder");
    let clock = TestClock::at(Y2026);
    let (mut renewer, lives) = running(dir.path(), &clock);
    let before: Vec<_> = lives.iter().map(|live| live.identity()).collect();
    for days in [0, 1, 250] {
        clock.set(Y2026 + days * DAY);
        let (renewed, failure) = renewer.renew();
        assert!(renewed.is_empty() && failure.is_none(), "{renewed:?} {failure:?}");
    }
    clock.set(Y2026 + 335 * DAY);
    let (renewed, failure) = renewer.renew();
    assert!(failure.is_none(), "{failure:?}");
    assert_eq!(renewed.certificates, ["admin", "apiserver", "front-proxy-client"]);
    assert!(!renewed.authorities);
    for (old, live) in before.iter().zip(&lives) {
        let (old, new) = (facts(&old.certificate), facts(&live.identity().certificate));
        assert_ne!(old, new);
        let same = |facts: &CertificateFacts| {
            (
                facts.common_name.clone(),
                facts.organization.clone(),
                facts.hosts.clone(),
                facts.for_servers,
                facts.for_clients,
            )
        };
        assert_eq!(same(&old), same(&new));
        assert!(new.not_after > old.not_after && !new.is_due((Y2026 + 335 * DAY) as i64));
    }
    // A restart finds the renewed ones.
    let (_, after) = running(dir.path(), &clock);
    assert_eq!(after[0].identity(), lives[0].identity());
    assert!(renewer.renew().0.is_empty());
}

#[test]
fn what_another_process_renewed_is_taken_over() {
    let dir = tempfile::tempdir().expect("a folder");
    let clock = TestClock::at(Y2026);
    let (mut renewer, lives) = running(dir.path(), &clock);
    let pki = Pki::open_at(dir.path(), clock.clock()).expect("keys");
    let new = pki.renewed("admin", true).expect("a certificate");
    assert_ne!(*lives[0].identity(), new);
    let (renewed, _) = renewer.renew();
    assert_eq!(renewed.certificates, ["admin"]);
    assert_eq!(*lives[0].identity(), new);
    // A half-written pair is made whole.
    let key = std::fs::read(dir.path().join("apiserver.key")).expect("a key");
    std::fs::write(dir.path().join("admin.key"), key).expect("a write");
    assert_eq!(renewer.renew().0.certificates, ["admin"]);
}

#[test]
fn a_wrong_clock_at_the_first_start_is_healed() {
    for wrong in [1000, Y2099] {
        let dir = tempfile::tempdir().expect("a folder");
        let clock = TestClock::at(wrong);
        let (mut renewer, lives) = running(dir.path(), &clock);
        let ca = std::fs::read_to_string(dir.path().join("ca.crt")).expect("a certificate");
        let old_admin = lives[0].identity();
        clock.set(Y2026);
        assert!(!facts(&ca).is_valid(Y2026 as i64) && !facts(&old_admin.certificate).is_valid(Y2026 as i64));
        // While it runs, or at a restart.
        let (new_ca, new_admin) = if wrong == 1000 {
            let (renewed, failure) = renewer.renew();
            assert!(
                failure.is_none() && renewed.authorities && renewed.certificates.len() == 3,
                "{failure:?}"
            );
            let ca = renewer.authority_certificates()[0].clone().expect("an authority");
            (ca, lives[0].identity())
        } else {
            let (renewer, lives) = running(dir.path(), &clock);
            let ca = renewer.authority_certificates()[0].clone().expect("an authority");
            (ca, lives[0].identity())
        };
        assert!(
            facts(&new_ca).is_valid(Y2026 as i64) && facts(&new_admin.certificate).is_valid(Y2026 as i64)
        );
        assert!(verifies(&new_ca, &new_admin.certificate, Y2026));
        // The same key and name: who has the old certificate verifies the new ones, and the other way round.
        assert!(verifies(&ca, &new_admin.certificate, Y2026));
        assert!(verifies(&new_ca, &old_admin.certificate, wrong));
    }
}

#[test]
fn an_authority_is_renewed_before_its_end_and_keeps_its_key() {
    let dir = tempfile::tempdir().expect("a folder");
    let clock = TestClock::at(Y2026);
    let (mut renewer, _) = running(dir.path(), &clock);
    let key = std::fs::read(dir.path().join("ca.key")).expect("a key");
    let before = renewer.authority_certificates().to_vec();
    clock.set(Y2026 + 6 * 365 * DAY);
    assert!(!renewer.renew().0.authorities);
    clock.set(Y2026 + 37 * 365 * DAY / 4);
    assert!(renewer.renew().0.authorities);
    assert_ne!(renewer.authority_certificates(), before);
    assert_eq!(std::fs::read(dir.path().join("ca.key")).expect("a key"), key);
    let listed = Pki::list(dir.path()).expect("a list");
    let names: Vec<&str> = listed.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        ["ca", "front-proxy-ca", "admin", "apiserver", "front-proxy-client"]
    );
}

#[test]
fn an_authority_of_somebody_else_is_left_alone() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut params = rcgen::CertificateParams::default();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "corporate");
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, "example");
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let now: SystemTime = SystemTime::UNIX_EPOCH + Duration::from_secs(Y2026);
    params.not_before = now.into();
    params.not_after = (now + Duration::from_secs(100 * DAY)).into();
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate").pem();
    std::fs::write(dir.path().join("ca.crt"), &certificate).expect("a write");
    std::fs::write(dir.path().join("ca.key"), key.serialize_pem()).expect("a write");
    let open = |days: u64| Pki::open_at(dir.path(), TestClock::at(Y2026 + days * DAY).clock());
    assert_eq!(open(95).expect("it lasts").ca_certificate(), certificate);
    let error = open(101).err().expect("it has ended").to_string();
    assert!(
        error.contains("ca.crt") && error.contains("not made by skiff"),
        "{error}"
    );
}
