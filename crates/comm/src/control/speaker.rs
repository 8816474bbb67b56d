//! The word of a launcher for a rank that ended before the ranks had met, of which nobody else can know.

use std::time::{Duration, Instant};

use super::conn::{LOOK, sleep_on};
use super::handshake::{Door, Miss};
use super::message::{Identity, Message, Purpose, host_name};
use super::spoke::attempt;
use super::{listen, own_side, parse_meeting};
use crate::error::CommError;
use crate::place::Place;

/// How long rank 0's answer is waited for, once it was told.
const ANSWER: Duration = Duration::from_secs(2);

/// Tells the ranks of a run that the one at `place` ended: rank 0, where it was another one; where it was rank 0, those who look
/// for it. Returns when rank 0 knows, or when `over` says so. Where the ranks had met they see the loss by themselves, and this
/// changes nothing.
pub(crate) fn speak_for(place: &Place, what: &str, over: &dyn Fn() -> bool) {
    let what = format!("it ended before the ranks had met: {what}");
    let said = match place.rank {
        0 => answer_for_main(place, &what, over),
        _ => tell_main(place, &what, over),
    };
    if let Err(e) = said {
        tracing::debug!("nobody was told of the end of rank {}: {e}", place.rank);
    }
}

/// Comes to the meeting in the rank's name, and fails there.
fn tell_main(place: &Place, what: &str, over: &dyn Fn() -> bool) -> Result<(), CommError> {
    let (host, port) = parse_meeting(&place.meeting)?;
    let identity = Identity::own(Purpose::Control, place.rank, place.world_size)?;
    let alive = || match over() {
        false => Ok(()),
        true => Err(CommError::Stopped("the start is over".into())),
    };
    loop {
        let deadline = Instant::now() + ANSWER;
        match attempt(&host, port, &place.secret, &identity, deadline, &alive) {
            Ok(mut conn) => {
                conn.send(&Message::Fail { what: what.into() });
                // Its sign of life may come before.
                while !matches!(conn.next(deadline, &alive), Ok(Message::Ack) | Err(_)) {}
                return Ok(());
            }
            // Rank 0 is not there yet, or an older attempt is ending there.
            Err(Miss::Later(_) | Miss::Secret(_)) => {}
            Err(Miss::Final(why)) => return Err(CommError::Rendezvous(why)),
        }
        alive()?;
        std::thread::sleep(LOOK);
    }
}

/// Stands where rank 0 would, and sends everyone away.
fn answer_for_main(place: &Place, what: &str, over: &dyn Fn() -> bool) -> Result<(), CommError> {
    let (host, port) = parse_meeting(&place.meeting)?;
    let listener = listen(own_side(&host), port)
        .map_err(|source| CommError::Io { what: format!("listening at {}", place.meeting), source })?;
    let mut door = Door::new(listener, &place.secret)?;
    while !over() {
        for newcomer in door.newcomers() {
            newcomer.refuse(&format!("rank 0 on host {}: {what}", host_name()));
        }
        let mut fds = Vec::new();
        door.poll_fds(&mut fds);
        sleep_on(&mut fds, LOOK)?;
    }
    Ok(())
}
