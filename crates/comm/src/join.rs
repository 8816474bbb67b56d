//! How ranks find each other and agree on the way their bytes go.
//!
//! Everyone tells everyone (through rank 0) its host and data port; the carrier is a pure function of what all said, so all
//! choose the same. Then all open it, and tell each other whether that worked.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::carrier::{self, Alive, Carrier, Opening, partners};
use crate::collective::link::{Costs, Link};
use crate::control::message::{Take, host_name, put_bytes};
use crate::control::{Control, listen_anywhere, own_address};
use crate::error::CommError;
use crate::place::Place;
use crate::secret::{self, hex};
use crate::settings::{Backend, Settings};

/// What a rank says of itself.
struct Card {
    host: String,
    /// Names the running kernel: hosts of one name are not always one.
    boot: String,
    backend: String,
    address: Option<IpAddr>,
    port: u16,
    /// Drawn for this start; rank 0's names it.
    start: secret::Nonce,
}

impl Card {
    fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for text in [&self.host, &self.boot, &self.backend] {
            put_bytes(&mut out, text.as_bytes());
        }
        put_bytes(&mut out, self.address.map(|ip| ip.to_string()).unwrap_or_default().as_bytes());
        put_bytes(&mut out, &self.port.to_le_bytes());
        out.extend_from_slice(&self.start);
        out
    }
    fn read(bytes: &[u8]) -> Option<Card> {
        let mut take = Take(bytes);
        Some(Card {
            host: take.text()?,
            boot: take.text()?,
            backend: take.text()?,
            address: take.text()?.parse().ok(),
            port: u16::from_le_bytes(take.bytes()?.try_into().ok()?),
            start: take.array()?,
        })
    }
}

/// Steps of the talk.
const CARDS: u32 = 1;
const SHARED_MEMORY: u32 = 2;
const OPENED: u32 = 3;

/// A rank that is connected.
pub(crate) struct Joined {
    pub control: Arc<Control>,
    pub link: Link,
    pub hosts: Arc<Vec<String>>,
    pub costs: Arc<Costs>,
}

/// Joins the ranks of `place`, unless this process is asked to end before all are there.
pub(crate) fn join(
    place: &Place,
    settings: &Settings,
    asked_to_end: &dyn Fn() -> bool,
) -> Result<Joined, CommError> {
    check(place, settings)?;
    let stopped = || {
        CommError::Stopped(format!(
            "rank {} was asked to end before all ranks had met at {}",
            place.rank, place.meeting
        ))
    };
    let alive = || if asked_to_end() { Err(stopped()) } else { Ok(()) };
    let deadline = Instant::now() + settings.join_timeout;
    // Before the meeting, so that nobody is told a port where nobody listens.
    let listener = listen_anywhere(settings)?;
    let port = listener
        .local_addr()
        .map_err(|source| CommError::Io { what: "asking for the own data port".into(), source })?
        .port();
    let control = Arc::new(Control::meet(place, settings, deadline, &alive)?);
    let result = connect(place, settings, deadline, listener, port, &control, &alive);
    if let Err(e) = &result {
        // Nothing where the run is over already.
        control.fail(&e.to_string());
    }
    // Where all were asked to, the word of the first one must not look like a failure to the others.
    result.map_err(|e| if asked_to_end() { stopped() } else { e })
}

fn check(place: &Place, settings: &Settings) -> Result<(), CommError> {
    if place.rank >= place.world_size || u32::try_from(place.world_size).is_err() {
        return Err(CommError::Place(format!(
            "rank {} of {} ranks: ranks count from 0 to one less than their number",
            place.rank, place.world_size
        )));
    }
    if place.secret.is_empty() {
        return Err(CommError::Place(
            "the ranks have no secret: give all of them the same TERCIO_SECRET, so that strangers are kept out".into(),
        ));
    }
    for (name, value) in [
        ("lost_after", settings.lost_after),
        ("collective_timeout", settings.collective_timeout),
        ("join_timeout", settings.join_timeout),
    ] {
        if value.is_zero() || value > Duration::from_secs(366 * 86400) {
            return Err(CommError::Place(format!(
                "{name} is {value:?}: expected more than nothing, a year at most"
            )));
        }
    }
    Ok(())
}

fn connect(
    place: &Place,
    settings: &Settings,
    deadline: Instant,
    listener: std::net::TcpListener,
    port: u16,
    control: &Arc<Control>,
    asked: Alive<'_>,
) -> Result<Joined, CommError> {
    let alive: Alive<'_> = &|| control.board.check().and_then(|()| asked());

    let own = Card {
        host: host_name(),
        boot: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().into(),
        backend: settings.backend.name().into(),
        // Rank 0 is where the others met it.
        address: own_address(settings)?.or((place.rank > 0).then_some(control.here)),
        port,
        start: secret::nonce()?,
    };
    let cards: Vec<Card> = control
        .exchange(CARDS, own.write(), deadline, alive)?
        .iter()
        .enumerate()
        .map(|(rank, bytes)| {
            Card::read(bytes)
                .ok_or_else(|| CommError::Protocol(format!("rank {rank} does not say where it is")))
        })
        .collect::<Result<_, _>>()?;
    control.board.set_host_of_main(&cards[0].host);
    if let Some(other) = cards.iter().position(|card| card.backend != cards[0].backend) {
        return Err(CommError::Rendezvous(format!(
            "the backend is {} on rank 0 (host {}) and {} on rank {other} (host {}): start all ranks with the same",
            cards[0].backend, cards[0].host, cards[other].backend, cards[other].host
        )));
    }
    let hosts = Arc::new(cards.iter().map(|card| card.host.clone()).collect::<Vec<_>>());
    let opening = Opening {
        rank: place.rank,
        size: place.world_size,
        local_size: place.local_size,
        partners: partners(place.rank, place.world_size),
        hosts: hosts.to_vec(),
        secret: place.secret.clone(),
        start: hex(&cards[0].start),
        deadline,
    };
    let address = |peer: usize| {
        let card = &cards[peer];
        let ip = match card.address {
            // A loopback address is on rank 0's host, and means this rank only if it is there too.
            Some(ip) if !ip.is_loopback() || control.here.is_loopback() => ip,
            _ => control.there,
        };
        SocketAddr::new(ip, card.port)
    };
    let second = listener
        .try_clone()
        .map_err(|source| CommError::Io { what: "keeping the own data port open".into(), source })?;
    let tcp = |partners: Vec<usize>, listener| {
        let opening = Opening { partners, ..opening.clone() };
        carrier::tcp::open(&opening, alive, listener, &address)
    };
    let all = || opening.partners.clone();
    let shared = match (settings.backend, sharing(&cards)) {
        (Backend::Mpi, _) => Some(agree(control, deadline, alive, carrier::open_mpi(&opening))?),
        (Backend::Local, _) => Some(agree(control, deadline, alive, carrier::local::open(&opening, alive))?),
        (Backend::Auto, Sharing::All) => {
            try_all(control, deadline, alive, carrier::local::open(&opening, alive))?
        }
        (Backend::Auto, Sharing::Some) => {
            let far = tcp(carrier::mixed::far_partners(&opening), listener)?;
            try_all(control, deadline, alive, carrier::mixed::open(&opening, alive, far))?
        }
        _ => None,
    };
    let carrier = match shared {
        Some(carrier) => carrier,
        None => agree(control, deadline, alive, tcp(all(), second))?,
    };
    let costs = Arc::new(Costs::default());
    let link = Link::new(
        place.rank,
        carrier,
        control.clone(),
        hosts.clone(),
        settings.collective_timeout,
        costs.clone(),
    );
    Ok(Joined { control: control.clone(), link, hosts, costs })
}

/// Who shares a host with whom.
#[derive(Debug, PartialEq)]
enum Sharing {
    All,
    Some,
    None,
}

fn sharing(cards: &[Card]) -> Sharing {
    let mut boots: BTreeMap<&str, &str> = BTreeMap::new();
    for card in cards {
        if *boots.entry(&card.host).or_insert(&card.boot) != card.boot {
            // Carriers know hosts by their names.
            return Sharing::None;
        }
    }
    match boots.len() {
        1 => Sharing::All,
        hosts if hosts < cards.len() => Sharing::Some,
        _ => Sharing::None,
    }
}

/// Goes on when all ranks opened their carrier.
fn agree(
    control: &Control,
    deadline: Instant,
    alive: Alive<'_>,
    opened: Result<Box<dyn Carrier>, CommError>,
) -> Result<Box<dyn Carrier>, CommError> {
    let carrier = opened?;
    control.exchange(OPENED, Vec::new(), deadline, alive)?;
    Ok(carrier)
}

/// The carrier if all ranks could open it; nothing, with a word on why, if one could not.
fn try_all(
    control: &Control,
    deadline: Instant,
    alive: Alive<'_>,
    opened: Result<Box<dyn Carrier>, CommError>,
) -> Result<Option<Box<dyn Carrier>>, CommError> {
    let word = opened.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = control.exchange(SHARED_MEMORY, word.into_bytes(), deadline, alive)?;
    match all.iter().position(|word| !word.is_empty()) {
        None => Ok(opened.ok()),
        Some(rank) => {
            let why = String::from_utf8_lossy(&all[rank]);
            tracing::info!("bytes go by TCP, though ranks share a host: rank {rank} says: {why}");
            Ok(None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(host: &str, boot: &str) -> Card {
        Card {
            host: host.into(),
            boot: boot.into(),
            backend: "auto".into(),
            address: None,
            port: 1,
            start: [7; 32],
        }
    }

    #[test]
    fn hosts_of_one_name_are_not_always_one() {
        assert_eq!(sharing(&[card("a", "1"), card("a", "1")]), Sharing::All);
        assert_eq!(sharing(&[card("a", "1"), card("a", "2")]), Sharing::None);
        assert_eq!(sharing(&[card("a", "1"), card("b", "1"), card("a", "1")]), Sharing::Some);
        assert_eq!(sharing(&[card("a", "1"), card("a", "2"), card("a", "2")]), Sharing::None);
    }

    #[test]
    fn a_card_comes_back() {
        let own = Card { address: Some("::1".parse().unwrap()), ..card("a", "1") };
        let read = Card::read(&own.write()).unwrap();
        assert_eq!((&read.host, &read.boot, read.address, read.port), (&own.host, &own.boot, own.address, 1));
        assert_eq!(read.start, own.start);
        assert!(Card::read(&own.write()[..10]).is_none());
    }
}
