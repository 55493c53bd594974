//! Cluster DNS: Corefiles, which whoever may write the ConfigMap chooses, and messages of resolvers.

/// A Corefile is read or refused with a line; it never panics and takes bounded time.
pub fn corefile(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Err(message) = skiff_dns::fuzz::corefile(text) {
        assert!(message.starts_with("Corefile:"), "{message}");
    }
}

/// The message of a resolver, as it is told to who asked the question in it: what is told can be read again. Then the same
/// bytes as a question.
pub fn dns_message(data: &[u8]) {
    if let Some(told) = skiff_dns::fuzz::forwarded(data, data) {
        assert!(skiff_dns::fuzz::forwarded(&told, &told).is_some());
    }
    skiff_dns::fuzz::question(data);
}
