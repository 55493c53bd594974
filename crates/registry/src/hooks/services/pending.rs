//! What writes under way in this process have chosen. A hint only: it keeps them from choosing the same and having to try
//! again; that nothing is given out twice is the store's to see to.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;

#[derive(Default)]
pub(super) struct Pending {
    /// Leaf lock.
    chosen: Mutex<Chosen>,
}

#[derive(Default)]
struct Chosen {
    addresses: HashSet<IpAddr>,
    ports: HashSet<u16>,
}

/// What one write has chosen, until it is dropped.
pub(super) struct Hold {
    of: Arc<Pending>,
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
}

impl Hold {
    pub fn new(of: &Arc<Pending>) -> Hold {
        Hold {
            of: of.clone(),
            addresses: Vec::new(),
            ports: Vec::new(),
        }
    }

    /// False if another write has chosen it.
    pub fn address(&mut self, address: IpAddr) -> bool {
        let free = self.of.chosen.lock().addresses.insert(address);
        if free {
            self.addresses.push(address);
        }
        free
    }

    /// False if another write has chosen it.
    pub fn port(&mut self, port: u16) -> bool {
        let free = self.of.chosen.lock().ports.insert(port);
        if free {
            self.ports.push(port);
        }
        free
    }

    /// Lets go of the address chosen last.
    pub fn drop_last_address(&mut self) {
        if let Some(address) = self.addresses.pop() {
            self.of.chosen.lock().addresses.remove(&address);
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut chosen = self.of.chosen.lock();
        for address in &self.addresses {
            chosen.addresses.remove(address);
        }
        for port in &self.ports {
            chosen.ports.remove(port);
        }
    }
}
