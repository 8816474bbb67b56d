//! Signals become a request to stop. A file of its own: handlers belong to the whole process.

use std::process::Command;

use tercio_train::run::{Signals, StopReason};

fn send(signal: &str) {
    let pid = std::process::id().to_string();
    assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    // `kill` returned, so the signal is pending; any system call of this thread or another one delivers it.
    std::thread::sleep(std::time::Duration::from_millis(50));
}

#[test]
fn signals_are_seen_by_urgency() {
    let signals = Signals::install().unwrap();
    assert_eq!(signals.requested(), None);
    for (name, expected) in [
        ("USR2", StopReason::User2),
        ("USR1", StopReason::User1),
        ("TERM", StopReason::Terminate),
        ("INT", StopReason::Interrupt),
    ] {
        send(name);
        assert_eq!(signals.requested(), Some(expected));
        assert_eq!(expected.name(), format!("SIG{name}"));
    }
}

#[test]
#[ignore = "runs as the child of the next test"]
fn child_interrupts_itself_twice() {
    let _signals = Signals::install().unwrap();
    send("INT");
    send("INT");
    std::process::exit(1);
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_interrupts_itself_twice", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    assert_eq!(child.status.code(), Some(tercio_train::run::signals::EXIT_INTERRUPTED.into()));
}
