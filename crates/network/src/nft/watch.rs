//! Who else changes our tables. The kernel announces every change of nftables rules, and names the netlink socket that made
//! it: changes by our own sockets are not delivered, those of tables that are not ours are passed over. So nothing is
//! asked and nothing runs while nobody else changes rules.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::ops::Deref;
use std::time::Duration;

use nlink::netlink::nftables::{
    Family, NFT_MSG_DELSETELEM, NFT_MSG_NEWGEN, NFT_MSG_NEWSETELEM, NftablesGroup,
};
use nlink::netlink::{Connection, Nftables};
use parking_lot::Mutex;
use tokio::time::Instant;

/// The pause between two reports: who changes our tables again and again keeps us busy no more than that often.
const PAUSE: Duration = Duration::from_millis(250);

/// The pause after a failure to read announcements.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);

/// Announcements that wait to be read, in bytes. Those that do not fit are a reason to compare everything.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Sets that are remembered by name; with more of them all are compared.
const MAX_SETS: usize = 64;

/// Sockets whose announcements the kernel does not deliver. Those of more are read and passed over.
const MAX_FILTERED: usize = 100;

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NLMSG_HEADER: usize = 16;
/// Where a netlink header has the sender's port id.
const PORT_ID_OFFSET: usize = 12;
const NFGENMSG_HEADER: usize = 4;
/// The table's name, whatever a message is about; for elements also their set's.
const TABLE_ATTRIBUTE: u16 = 1;
const SET_ATTRIBUTE: u16 = 2;
const ATTRIBUTE_TYPE_MASK: u16 = 0x3fff;

/// The netlink port ids of this process' connections that change tables, and how many connections have each: in another
/// network namespace, which tests have, the same number is another socket. A leaf lock.
static OWN: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// A connection whose changes are our own: no [`Watch`] reports them.
pub(crate) struct OwnConnection(Connection<Nftables>);

impl OwnConnection {
    pub(crate) fn open() -> nlink::Result<OwnConnection> {
        let connection = Connection::<Nftables>::new()?;
        *OWN.lock().entry(connection.socket().pid()).or_default() += 1;
        Ok(OwnConnection(connection))
    }
}

impl Deref for OwnConnection {
    type Target = Connection<Nftables>;

    fn deref(&self) -> &Connection<Nftables> {
        &self.0
    }
}

impl Drop for OwnConnection {
    fn drop(&mut self) {
        let mut own = OWN.lock();
        let id = self.0.socket().pid();
        if let Some(count) = own.get_mut(&id) {
            *count -= 1;
            if *count == 0 {
                own.remove(&id);
            }
        }
    }
}

/// What somebody else has changed of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    /// The table itself, chains, rules or sets.
    pub(crate) rules: bool,
    /// Elements of these sets.
    pub(crate) sets: BTreeSet<String>,
    /// Elements of any set: announcements were lost.
    pub(crate) all_sets: bool,
}

impl Touched {
    /// Announcements were lost.
    fn anything() -> Touched {
        Touched {
            rules: true,
            sets: BTreeSet::new(),
            all_sets: true,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Touched::default()
    }

    fn add_set(&mut self, name: &str) {
        if self.all_sets || self.sets.contains(name) {
            return;
        }
        if self.sets.len() == MAX_SETS {
            self.sets.clear();
            self.all_sets = true;
        } else {
            self.sets.insert(name.to_owned());
        }
    }
}

/// Reports changes of certain tables by others.
pub(crate) struct Watch {
    /// Of announcements only: nothing is asked by it.
    connection: Connection<Nftables>,
    tables: Vec<(Family, String)>,
    /// For each of the tables.
    touched: Vec<Touched>,
    not_before: Instant,
    /// Whose announcements the kernel does not deliver.
    filtered: Vec<u32>,
}

impl Watch {
    /// Open it before the tables are made: what happens from now on is reported.
    pub(crate) fn open(
        tables: impl IntoIterator<Item = (Family, impl Into<String>)>,
    ) -> nlink::Result<Watch> {
        let connection = Connection::<Nftables>::new()?;
        connection.socket().set_rcvbuf(RECEIVE_BUFFER)?;
        let tables: Vec<_> = tables
            .into_iter()
            .map(|(family, name)| (family, name.into()))
            .collect();
        let mut watch = Watch {
            connection,
            touched: vec![Touched::default(); tables.len()],
            tables,
            not_before: Instant::now(),
            filtered: Vec::new(),
        };
        watch.filter();
        watch.connection.subscribe(&[NftablesGroup::All])?;
        Ok(watch)
    }

    /// Returns when somebody else has changed one of the tables. Nothing is lost if it is dropped before.
    pub(crate) async fn changed(&mut self) {
        while self.touched.iter().all(Touched::is_empty) {
            let read = poll_fn(|cx| self.connection.socket().poll_recv(cx)).await;
            self.note(read);
        }
        tokio::time::sleep_until(self.not_before).await;
        // One change is announced by many messages.
        self.has_news();
    }

    /// Whether somebody else has changed one of these tables by now.
    pub(crate) fn has_news_of(&mut self, tables: &[(Family, &str)]) -> bool {
        self.has_news();
        let mut touched = self.tables.iter().zip(&self.touched);
        touched.any(|((family, name), touched)| {
            !touched.is_empty() && tables.contains(&(*family, name.as_str()))
        })
    }

    /// Whether somebody else has changed any of the tables by now.
    fn has_news(&mut self) -> bool {
        while let Some(read) = self.connection.socket().try_recv_msg().transpose() {
            // What waits is read to its end also when something was lost: until then, the kernel does not say so again.
            let failed = matches!(&read, Err(error) if error.errno() != Some(libc::ENOBUFS));
            self.note(read);
            if failed {
                break;
            }
        }
        !self.touched.iter().all(Touched::is_empty)
    }

    /// What was changed of each table, in their order.
    pub(crate) fn take(&mut self) -> Vec<Touched> {
        self.not_before = self.not_before.max(Instant::now() + PAUSE);
        self.touched.iter_mut().map(std::mem::take).collect()
    }

    fn note(&mut self, read: nlink::Result<Vec<u8>>) {
        match read {
            Ok(announced) => self.note_announced(&announced),
            Err(error) => {
                if error.errno() != Some(libc::ENOBUFS) {
                    tracing::warn!(%error, "cannot read the announcements of nftables");
                    self.not_before = Instant::now() + FAILURE_PAUSE;
                }
                self.touched.fill(Touched::anything());
            }
        }
    }

    fn note_announced(&mut self, mut announced: &[u8]) {
        let mut of_own = false;
        while let Some(message) = Announcement::first_of(announced) {
            announced = announced.get(message.length..).unwrap_or_default();
            let is_own = OWN.lock().contains_key(&message.port_id);
            of_own |= is_own;
            let table = self
                .tables
                .iter()
                .position(|(family, name)| *family as u8 == message.family && name == message.table);
            let Some(table) = table.filter(|_| !is_own) else {
                continue;
            };
            match message.set {
                Some(set) => self.touched[table].add_set(set),
                None => self.touched[table].rules = true,
            }
        }
        if of_own {
            self.filter();
        }
    }

    /// Has the kernel keep the announcements of our own changes: what a large change of ours announces would not fit into the
    /// buffer. One datagram is of one sender.
    fn filter(&mut self) {
        let own: Vec<u32> = OWN.lock().keys().copied().take(MAX_FILTERED).collect();
        if own == self.filtered {
            return;
        }
        match self.connection.socket().attach_filter(&filter_program(&own)) {
            Ok(()) => self.filtered = own,
            Err(error) => tracing::debug!(%error, "cannot filter the announcements of nftables"),
        }
    }
}

/// A socket filter that drops datagrams of these senders.
fn filter_program(senders: &[u32]) -> Vec<u8> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let mut program = Vec::new();
    let mut add = |code: u16, if_true: u8, if_false: u8, value: u32| {
        program.extend(code.to_ne_bytes());
        program.extend([if_true, if_false]);
        program.extend(value.to_ne_bytes());
    };
    add(LOAD_WORD, 0, 0, PORT_ID_OFFSET as u32);
    for sender in senders {
        // A filter reads words in network order.
        add(JUMP_IF_EQUAL, 0, 1, u32::from_be_bytes(sender.to_ne_bytes()));
        add(RETURN, 0, 0, 0);
    }
    add(RETURN, 0, 0, u32::MAX);
    program
}

/// A message that says what was changed.
#[derive(Debug, PartialEq, Eq)]
struct Announcement<'a> {
    /// With what pads it.
    length: usize,
    port_id: u32,
    family: u8,
    /// Empty if it is about none.
    table: &'a str,
    /// If it is about elements.
    set: Option<&'a str>,
}

impl Announcement<'_> {
    /// The first message; `None` at the end and if it cannot be read.
    fn first_of(bytes: &[u8]) -> Option<Announcement<'_>> {
        let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let length = word(0)? as usize;
        let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
        let port_id = word(PORT_ID_OFFSET)?;
        let body = bytes.get(NLMSG_HEADER..length)?;
        let mut announcement = Announcement {
            length: length.next_multiple_of(4),
            port_id,
            family: body.first().copied().unwrap_or_default(),
            table: "",
            set: None,
        };
        let of = kind as u8;
        if kind >> 8 != NFNL_SUBSYS_NFTABLES || of == NFT_MSG_NEWGEN {
            return Some(announcement);
        }
        let attributes = body.get(NFGENMSG_HEADER..).unwrap_or_default();
        announcement.table = text(attributes, TABLE_ATTRIBUTE).unwrap_or_default();
        if of == NFT_MSG_NEWSETELEM || of == NFT_MSG_DELSETELEM {
            announcement.set = text(attributes, SET_ATTRIBUTE);
        }
        Some(announcement)
    }
}

/// The attribute of this type, as text.
fn text(mut attributes: &[u8], wanted: u16) -> Option<&str> {
    loop {
        let length = usize::from(u16::from_ne_bytes(attributes.get(0..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(attributes.get(2..4)?.try_into().ok()?) & ATTRIBUTE_TYPE_MASK;
        let value = attributes.get(4..length)?;
        if kind == wanted {
            return std::str::from_utf8(value.strip_suffix(&[0]).unwrap_or(value)).ok();
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::{Look, Standing};
    use nlink::netlink::nftables::{Chain, Set, SetElement, SetKeyType};

    fn message(kind: u8, port_id: u32, names: &[&str]) -> Vec<u8> {
        let mut body = vec![Family::Inet as u8, 0, 0, 0];
        for (name, kind) in names.iter().zip(1..) {
            body.extend(crate::proxy::string_attribute(kind, name));
        }
        let length = (NLMSG_HEADER + body.len()) as u32;
        let kind = NFNL_SUBSYS_NFTABLES << 8 | u16::from(kind);
        let header = [length.to_ne_bytes().to_vec(), kind.to_ne_bytes().to_vec()].concat();
        [header, vec![0; 6], port_id.to_ne_bytes().to_vec(), body].concat()
    }

    #[test]
    fn announcements_are_read() {
        let two = [
            message(NFT_MSG_DELSETELEM, 7, &["table", "set"]),
            message(3, 8, &["long-table", "chain"]),
        ]
        .concat();
        let first = Announcement::first_of(&two).unwrap();
        assert_eq!((first.port_id, first.table, first.set), (7, "table", Some("set")));
        let second = Announcement::first_of(&two[first.length..]).unwrap();
        assert_eq!(
            (second.port_id, second.table, second.set),
            (8, "long-table", None)
        );
        assert_eq!(second.family, Family::Inet as u8);
        // What is cut off says nothing, and does no harm.
        for end in 0..two.len() {
            let mut rest = &two[..end];
            while let Some(one) = Announcement::first_of(rest) {
                rest = rest.get(one.length..).unwrap_or_default();
            }
        }
        let zero = [0; 64];
        assert_eq!(Announcement::first_of(&zero), None);
    }

    #[test]
    fn sets_beyond_the_limit_are_all_sets() {
        let mut touched = Touched::default();
        for number in 0..=MAX_SETS {
            assert!(!touched.all_sets);
            touched.add_set(&number.to_string());
        }
        assert!(touched.all_sets && touched.sets.is_empty());
    }

    /// Changes by others are reported for what they are, our own are not, also of a connection that came later.
    #[test]
    fn others_are_told_from_ourselves() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let tried = std::thread::spawn(|| {
            // SAFETY: only the network namespace changes, and the thread ends with the test.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                in_a_kernel().await;
                rules_are_remembered().await;
            });
        });
        tried.join().unwrap();
    }

    fn set_of(table: &str) -> Set {
        Set::new(table, "set")
            .family(Family::Inet)
            .key_type(SetKeyType::Ipv4Addr)
    }

    /// Elements whose announcements do not fit into the buffer.
    fn many() -> Vec<SetElement> {
        (0..40_000u32)
            .map(|number| SetElement::ipv4(number.into()))
            .collect()
    }

    async fn in_a_kernel() {
        const SHORT: Duration = Duration::from_millis(300);
        let own = OwnConnection::open().unwrap();
        let mut watch = Watch::open([(Family::Inet, "one"), (Family::Ip, "two")]).unwrap();
        let later = OwnConnection::open().unwrap();
        let other = Connection::<Nftables>::new().unwrap();
        let set = || set_of("one");
        own.add_table("one", Family::Inet).await.unwrap();
        later.add_table("two", Family::Ip).await.unwrap();
        own.add_set(set()).await.unwrap();
        other.add_table("three", Family::Inet).await.unwrap();
        // The name of ours in another family.
        other.add_table("one", Family::Ip).await.unwrap();
        assert!(tokio::time::timeout(SHORT, watch.changed()).await.is_err());

        let one = SetElement::ipv4([192, 0, 2, 1].into());
        other.add_set_elements(&set(), &[one]).await.unwrap();
        watch.changed().await;
        let sets = || Touched {
            sets: ["set".to_owned()].into(),
            ..Touched::default()
        };
        assert_eq!(watch.take(), [sets(), Touched::default()]);
        let chain = Chain::new("two", "chain").unwrap().family(Family::Ip);
        other.add_chain(chain).await.unwrap();
        watch.changed().await;
        let rules = || Touched {
            rules: true,
            ..Touched::default()
        };
        assert_eq!(watch.take(), [Touched::default(), rules()]);
        other.flush_ruleset().await.unwrap();
        watch.changed().await;
        assert!(watch.take().iter().all(|touched| touched.rules));

        // More than the buffer holds.
        other.add_table("one", Family::Inet).await.unwrap();
        other.add_set(set()).await.unwrap();
        watch.changed().await;
        watch.take();
        let elements = many();
        for elements in elements.chunks(200) {
            other.add_set_elements(&set(), elements).await.unwrap();
        }
        watch.changed().await;
        assert_eq!(watch.take(), [Touched::anything(), Touched::anything()]);
        // The same by ourselves is not even delivered.
        for elements in elements.chunks(200) {
            own.del_set_elements(&set(), elements).await.unwrap();
        }
        assert!(tokio::time::timeout(SHORT, watch.changed()).await.is_err());
    }

    /// Rules that were just made are known: announcements that are lost are no reason to make them again. What somebody else has
    /// changed before they could be looked at is.
    async fn rules_are_remembered() {
        let (own, other) = (
            OwnConnection::open().unwrap(),
            Connection::<Nftables>::new().unwrap(),
        );
        let mut watch = Watch::open([(Family::Inet, "primed"), (Family::Ip, "beside")]).unwrap();
        let tables = [(Family::Inet, "primed")];
        own.add_table("primed", Family::Inet).await.unwrap();
        // That is another table's.
        other.add_table("beside", Family::Ip).await.unwrap();
        let mut standing = Standing::default();
        standing.prime(&own, &tables, &mut watch).await;
        other.add_table("others", Family::Inet).await.unwrap();
        other.add_set(set_of("others")).await.unwrap();
        for elements in many().chunks(200) {
            other.add_set_elements(&set_of("others"), elements).await.unwrap();
        }
        watch.changed().await;
        assert_eq!(watch.take(), [Touched::anything(), Touched::anything()]);
        let look = standing.look(&own, &tables, true, None).await;
        assert_eq!(look.unwrap(), Look::Same);

        standing.rules_changed();
        let chain = Chain::new("primed", "chain").unwrap().family(Family::Inet);
        other.add_chain(chain).await.unwrap();
        standing.prime(&own, &tables, &mut watch).await;
        let look = standing.look(&own, &tables, true, None).await;
        assert_eq!(look.unwrap(), Look::Lost);
    }
}
