//! Strangers become ranks: both sides prove that they know the secret, then say who they are.
//!
//! Who connects: hello, its nonce. Who listens: its nonce. Who connects: a code over both and its identity. Who listens: a
//! code over the same, or a reason. The secret itself never travels.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::conn::Conn;
use super::message::{Identity, Message, PROTOCOL, RANK_LIMIT, Refusal};
use crate::carrier::Alive;
use crate::error::CommError;
use crate::secret::{self, Mac, Nonce};

/// How long a newcomer may take to prove itself.
const PATIENCE: Duration = Duration::from_secs(10);
/// Newcomers at a time; one more turns out the oldest, who comes again if it is a rank.
const NEWCOMERS: usize = 256;
/// How long nobody is accepted after the system could not.
const REST: Duration = Duration::from_millis(200);

/// Why a connection came to nothing, for who connects.
#[derive(Debug)]
pub(crate) enum Miss {
    /// Nobody there (yet), or what answers is no rank (yet).
    Later(String),
    /// The other side knows another secret: another run, maybe one that is ending.
    Secret(String),
    /// No use in trying again.
    Final(String),
}

/// Proves who `identity` is to who listens at `address`.
pub(crate) fn connect(
    address: SocketAddr,
    secret: &str,
    identity: &Identity,
    deadline: Instant,
    alive: Alive<'_>,
) -> Result<Conn, Miss> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, left.min(Duration::from_secs(5)))
        .map_err(|e| Miss::Later(e.to_string()))?;
    // A port of the range for outgoing connections can meet itself while nobody listens yet.
    if stream.local_addr().ok() == stream.peer_addr().ok() {
        return Err(Miss::Later("nobody listens".into()));
    }
    let mut conn = Conn::new(stream).map_err(|e| Miss::Later(e.to_string()))?;
    // As patient as who listens: a busy rank 0 of a large run takes its time.
    let deadline = deadline.min(Instant::now() + 3 * PATIENCE);
    let own: Nonce = secret::nonce().map_err(|e| Miss::Final(e.to_string()))?;
    conn.send(&Message::Hello { protocol: PROTOCOL, nonce: own });
    let theirs = match conn.next(deadline, alive).map_err(Miss::Later)? {
        Message::Challenge { nonce } => nonce,
        Message::Refused { reason, .. } => return Err(Miss::Final(reason)),
        _ => return Err(Miss::Later("it does not answer as a rank does".into())),
    };
    let said = identity.write();
    conn.send(&Message::Proof {
        mac: secret::mac(secret, &[b"who connects", &own, &theirs, &said]),
        identity: said.clone(),
    });
    match conn.next(deadline, alive).map_err(Miss::Later)? {
        Message::Welcome { mac }
            if secret::same(&mac, &secret::mac(secret, &[b"who listens", &own, &theirs, &said])) =>
        {
            conn.limit = RANK_LIMIT;
            Ok(conn)
        }
        Message::Welcome { .. } => Err(Miss::Secret("it does not know the secret of this run".into())),
        Message::Refused { refusal: Refusal::Secret, reason } => Err(Miss::Secret(reason)),
        Message::Refused { refusal: Refusal::Final, reason } => Err(Miss::Final(reason)),
        _ => Err(Miss::Later("it does not answer as a rank does".into())),
    }
}

/// One who proved the secret and waits for an answer.
pub(crate) struct Newcomer {
    conn: Conn,
    welcome: Mac,
    pub(crate) identity: Identity,
}

impl Newcomer {
    /// Takes it in.
    pub(crate) fn welcome(mut self) -> Conn {
        self.conn.limit = RANK_LIMIT;
        self.conn.send(&Message::Welcome { mac: self.welcome });
        self.conn
    }
    /// Sends it away for good.
    pub(crate) fn refuse(mut self, reason: &str) {
        self.conn.send(&Message::Refused { refusal: Refusal::Final, reason: reason.into() });
    }
}

struct Stranger {
    conn: Conn,
    since: Instant,
    /// Both nonces, once a hello came.
    nonces: Option<(Nonce, Nonce)>,
}

/// Listens, and lets nobody through who does not know the secret. Never waits.
pub(crate) struct Door {
    listener: TcpListener,
    secret: String,
    strangers: Vec<Stranger>,
    /// No descriptors were left: until then nobody is accepted, so that the loop does not spin.
    rests_until: Option<Instant>,
}

impl Door {
    pub(crate) fn new(listener: TcpListener, secret: &str) -> Result<Door, CommError> {
        listener
            .set_nonblocking(true)
            .map_err(|source| CommError::Io { what: "preparing the listening socket".into(), source })?;
        Ok(Door { listener, secret: secret.into(), strangers: Vec::new(), rests_until: None })
    }

    /// What a poll has to look for.
    pub(crate) fn poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if self.rests_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        fds.extend(self.strangers.iter().map(|s| s.conn.poll_fd()));
    }

    /// Whether there is something that time alone changes.
    pub(crate) fn busy(&self) -> bool {
        !self.strangers.is_empty() || self.rests_until.is_some()
    }

    /// Goes on with every stranger as far as goes; those who proved themselves.
    pub(crate) fn newcomers(&mut self) -> Vec<Newcomer> {
        self.accept();
        let mut proved = Vec::new();
        for mut stranger in std::mem::take(&mut self.strangers) {
            stranger.conn.flush();
            let messages = stranger.conn.receive();
            match self.hear(stranger, messages) {
                Heard::Proved(newcomer) => proved.push(*newcomer),
                Heard::More(stranger) => self.strangers.push(stranger),
                Heard::Away(why) => tracing::debug!("a connection was refused: {why}"),
            }
        }
        proved
    }

    fn accept(&mut self) {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.rests_until = None;
        // Bounded, so that a flood of strangers cannot keep the ranks from being heard.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.strangers.len() >= NEWCOMERS {
                        self.strangers.remove(0);
                    }
                    if let Ok(conn) = Conn::new(stream) {
                        self.strangers.push(Stranger { conn, since: Instant::now(), nonces: None });
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                // One that went before it was accepted, or no descriptor left just now.
                Err(e) => {
                    tracing::debug!("a connection could not be accepted: {e}");
                    self.rests_until = Some(Instant::now() + REST);
                    return;
                }
            }
        }
    }

    fn hear(&self, mut stranger: Stranger, messages: Vec<Message>) -> Heard {
        for message in messages {
            match (message, stranger.nonces) {
                (Message::Hello { protocol, .. }, None) if protocol != PROTOCOL => {
                    let reason = format!(
                        "rank 0 speaks version {PROTOCOL} of the ranks' protocol, this process version {protocol}: run the same tercio everywhere"
                    );
                    stranger.conn.send(&Message::Refused { refusal: Refusal::Final, reason });
                    return Heard::Away(format!("it speaks version {protocol} of the ranks' protocol"));
                }
                (Message::Hello { nonce: theirs, .. }, None) => {
                    let Ok(own) = secret::nonce() else { return Heard::Away("no random numbers".into()) };
                    stranger.nonces = Some((theirs, own));
                    stranger.conn.send(&Message::Challenge { nonce: own });
                }
                (Message::Proof { mac, identity: said }, Some((theirs, own))) => {
                    if !secret::same(
                        &mac,
                        &secret::mac(&self.secret, &[b"who connects", &theirs, &own, &said]),
                    ) {
                        let reason = "it belongs to a run with another secret".to_string();
                        stranger.conn.send(&Message::Refused { refusal: Refusal::Secret, reason });
                        return Heard::Away("it does not know the secret".into());
                    }
                    let Some(identity) = Identity::read(&said) else {
                        return Heard::Away("it does not say who it is".into());
                    };
                    let welcome = secret::mac(&self.secret, &[b"who listens", &theirs, &own, &said]);
                    return Heard::Proved(Box::new(Newcomer { conn: stranger.conn, welcome, identity }));
                }
                _ => return Heard::Away("it does not talk as a rank does".into()),
            }
        }
        if let Some(why) = stranger.conn.ended {
            return Heard::Away(why);
        }
        if stranger.since.elapsed() > PATIENCE {
            return Heard::Away(format!("it did not prove itself within {} s", PATIENCE.as_secs()));
        }
        Heard::More(stranger)
    }
}

enum Heard {
    Proved(Box<Newcomer>),
    More(Stranger),
    Away(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::message::Purpose;

    /// Lets one in who connects as `work` does; what the door and it say.
    fn meet<R: Send>(work: impl FnOnce(SocketAddr) -> R + Send) -> (Vec<Identity>, R) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut door = Door::new(listener, "secret").unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || work(address));
            let mut came = Vec::new();
            while !thread.is_finished() {
                for newcomer in door.newcomers() {
                    came.push(newcomer.identity.clone());
                    newcomer.welcome();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            (came, thread.join().unwrap())
        })
    }

    const ALIVE: Alive<'static> = &|| Ok(());

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn who_knows_the_secret_gets_in_as_who_it_is() {
        let own = Identity::own(Purpose::Data, 3, 8).unwrap();
        let (came, result) = meet(|address| connect(address, "secret", &own, soon(), ALIVE));
        assert!(result.is_ok());
        assert_eq!(came, std::slice::from_ref(&own));
        let (came, result) = meet(|address| connect(address, "other", &own, soon(), ALIVE));
        assert!(matches!(result, Err(Miss::Secret(_))));
        assert_eq!(came, []);
    }

    #[test]
    fn another_protocol_is_named() {
        let (came, answer) = meet(|address| {
            let mut conn = Conn::new(TcpStream::connect(address).unwrap()).unwrap();
            conn.send(&Message::Hello { protocol: PROTOCOL + 1, nonce: [0; 32] });
            conn.next(soon(), ALIVE).unwrap()
        });
        assert_eq!(came, []);
        let Message::Refused { refusal: Refusal::Final, reason } = answer else { panic!("{answer:?}") };
        assert!(reason.contains("run the same tercio everywhere"), "{reason}");
    }

    #[test]
    fn a_proof_of_another_identity_is_refused() {
        let own = Identity::own(Purpose::Data, 3, 8).unwrap();
        let (came, answer) = meet(|address| {
            let mut conn = Conn::new(TcpStream::connect(address).unwrap()).unwrap();
            conn.send(&Message::Hello { protocol: PROTOCOL, nonce: [1; 32] });
            let Message::Challenge { nonce } = conn.next(soon(), ALIVE).unwrap() else { panic!() };
            let mac = secret::mac("secret", &[b"who connects", &[1; 32], &nonce, &own.write()]);
            let said = Identity { rank: 4, ..own.clone() }.write();
            conn.send(&Message::Proof { mac, identity: said });
            conn.next(soon(), ALIVE).unwrap()
        });
        assert_eq!(came, []);
        assert!(matches!(answer, Message::Refused { refusal: Refusal::Secret, .. }));
    }

    #[test]
    fn who_listens_has_to_prove_itself_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut conn = Conn::new(listener.accept().unwrap().0).unwrap();
                conn.next(soon(), ALIVE).unwrap();
                conn.send(&Message::Challenge { nonce: [7; 32] });
                conn.next(soon(), ALIVE).unwrap();
                conn.send(&Message::Welcome { mac: [7; 32] });
            });
            let own = Identity::own(Purpose::Control, 1, 2).unwrap();
            assert!(matches!(connect(address, "secret", &own, soon(), ALIVE), Err(Miss::Secret(_))));
        });
    }

    #[test]
    fn a_crowd_of_strangers_keeps_nobody_out() {
        let own = Identity::own(Purpose::Data, 3, 8).unwrap();
        let (came, result) = meet(|address| {
            let crowd: Vec<_> = (0..200).map(|_| TcpStream::connect(address)).collect();
            let result = connect(address, "secret", &own, soon(), ALIVE);
            drop(crowd);
            result
        });
        assert!(result.is_ok());
        assert_eq!(came, [own]);
    }
}
