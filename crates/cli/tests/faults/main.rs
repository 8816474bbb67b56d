//! Ranks in trouble on one host: stopped, slow, cut off, killed; strangers at the door; a port that is taken; a full disk; a
//! clock that jumps; a launcher that dies. Each has its documented end: no hang beyond the setting, no orphan, no damaged checkpoint.

mod clock;
mod door;
mod launcher;
mod peers;
mod ranks;
mod soak;
#[path = "../support/mod.rs"]
mod support;
