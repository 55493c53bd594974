//! The answer of a list: cached objects copied one after the other, in pieces, never decoded and never
//! all in memory at once.

use std::io::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::write::GzEncoder;
use http_body::{Body, Frame, SizeHint};
use skiff_registry::Entry;

use crate::body::BoxError;
use crate::compress;
use crate::cork::append;

/// Few enough bytes to stay in a processor's cache on their way, and to be under way soon.
const PIECE: usize = 64 * 1024;
/// The first piece is one record of TLS: the client is awake and at work while the next is copied.
const FIRST: usize = 14 * 1024;

/// The parts of a list in order: head, items with commas between them, tail.
pub struct ListBody {
    head: Bytes,
    items: std::vec::IntoIter<Item>,
    tail: &'static [u8],
    left: u64,
    first: bool,
    gzip: Option<GzEncoder<Vec<u8>>>,
    done: bool,
}

/// One object of the list.
pub enum Item {
    /// A cached object without its first `skip` bytes, which are its kind and apiVersion.
    Cached { entry: Arc<Entry>, skip: usize },
    /// An object that had to be made anew.
    Made(Bytes),
}

impl Item {
    /// An item as it is cached: `opening` is what all stored objects of the kind start with.
    pub fn cached(entry: Arc<Entry>, opening: &str) -> Option<Item> {
        entry.bytes.starts_with(opening.as_bytes()).then(|| Item::Cached {
            entry,
            skip: opening.len(),
        })
    }

    /// An item as it is cached, its kind and apiVersion included.
    pub fn whole(entry: Arc<Entry>) -> Item {
        Item::Cached { entry, skip: 1 }
    }

    fn len(&self) -> usize {
        match self {
            Item::Cached { entry, skip } => entry.bytes.len() - skip + 1,
            Item::Made(bytes) => bytes.len(),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Item::Cached { entry, skip } => {
                out.push(b'{');
                append(out, &entry.bytes[*skip..]);
            }
            Item::Made(bytes) => append(out, bytes),
        }
    }
}

impl ListBody {
    pub fn new(head: Bytes, items: Vec<Item>) -> ListBody {
        let tail: &'static [u8] = b"]}\n";
        let commas = items.len().saturating_sub(1);
        let left = head.len() + items.iter().map(Item::len).sum::<usize>() + commas + tail.len();
        ListBody {
            head,
            items: items.into_iter(),
            tail,
            left: left as u64,
            first: true,
            gzip: None,
            done: false,
        }
    }

    pub fn len(&self) -> u64 {
        self.left
    }

    pub fn gzip(mut self) -> ListBody {
        self.gzip = Some(compress::encoder());
        self
    }

    fn piece(&mut self) -> Option<Vec<u8>> {
        let size = if self.first { FIRST } else { PIECE };
        let mut out = Vec::with_capacity(size.min(self.left as usize) + 4096);
        out.extend_from_slice(&std::mem::take(&mut self.head));
        while out.len() < size {
            match self.items.next() {
                Some(item) => {
                    if !std::mem::take(&mut self.first) {
                        out.push(b',');
                    }
                    item.write(&mut out);
                }
                None => {
                    out.extend_from_slice(std::mem::take(&mut self.tail));
                    break;
                }
            }
        }
        (!out.is_empty()).then_some(out)
    }
}

impl Body for ListBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.gzip.is_none() {
            return Poll::Ready(this.piece().map(|piece| {
                this.left = this.left.saturating_sub(piece.len() as u64);
                Ok(Frame::data(Bytes::from(piece)))
            }));
        }
        loop {
            if this.done {
                return Poll::Ready(None);
            }
            let piece = this.piece();
            let Some(gzip) = this.gzip.as_mut() else {
                return Poll::Ready(None);
            };
            let written = match piece {
                Some(piece) => gzip.write_all(&piece).map(|()| std::mem::take(gzip.get_mut())),
                None => {
                    this.done = true;
                    gzip.try_finish().map(|()| std::mem::take(gzip.get_mut()))
                }
            };
            match written {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(Bytes::from(bytes))))),
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        if self.gzip.is_some() {
            self.done
        } else {
            self.left == 0
        }
    }

    fn size_hint(&self) -> SizeHint {
        if self.gzip.is_some() {
            SizeHint::default()
        } else {
            SizeHint::with_exact(self.left)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn the_length_is_what_is_sent() {
        for count in [0usize, 1, 3, 5000] {
            let items = (0..count)
                .map(|n| Item::Made(format!("{{\"n\":{n},\"pad\":\"{}\"}}", "x".repeat(100)).into()))
                .collect();
            let body = ListBody::new(Bytes::from_static(b"{\"items\":["), items);
            let announced = body.size_hint().exact();
            let bytes = body.collect().await.expect("collects").to_bytes();
            assert_eq!(announced, Some(bytes.len() as u64));
            let value: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
            assert_eq!(value["items"].as_array().map(Vec::len), Some(count));
        }
    }

    #[tokio::test]
    async fn gzip_holds_the_same() {
        let items = (0..5000)
            .map(|n| Item::Made(format!("{{\"n\":{n}}}").into()))
            .collect();
        let body = ListBody::new(Bytes::from_static(b"{\"items\":["), items).gzip();
        let bytes = body.collect().await.expect("collects").to_bytes();
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&bytes[..]), &mut text).expect("gzip");
        let value: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(value["items"].as_array().map(Vec::len), Some(5000));
    }
}
