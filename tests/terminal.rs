//! Promise: on a terminal, lines end between words. Files and pipes get whole lines.
#![cfg(unix)]

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

use nix::pty::{Winsize, openpty};

use crate::program::on_the_cpu;

const COLUMNS: u16 = 50;

fn medusa(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    on_the_cpu(&mut command).env("NO_COLOR", "1").args(arguments);
    command
}

/// What a terminal of 50 columns gets.
fn on_a_terminal(mut command: Command) -> String {
    let size = Winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = openpty(&size, None).expect("a terminal");
    let end = || Stdio::from(pty.slave.try_clone().expect("a handle"));
    let mut running = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("it runs");
    drop((command, pty.slave));
    let (mut shown, mut piece) = (Vec::new(), [0; 4096]);
    let mut screen = File::from(pty.master);
    while let Ok(read @ 1..) = screen.read(&mut piece) {
        shown.extend(&piece[..read]);
    }
    running.wait().expect("it ends");
    String::from_utf8(shown).expect("UTF-8").replace('\r', "")
}

fn in_a_pipe(mut command: Command) -> String {
    let output = command.output().expect("it runs");
    String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8")
}

fn widest(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

#[test]
fn a_terminal_breaks_no_word() {
    for arguments in [
        &["inspect", "data/tiny/backbone"][..],
        &["inspect", "Cargo.toml"],
        &["inspect", "data/tiny/backbone", "--seed", "1"],
        &["generate", "--backbone", "data/tiny/backbone", "--prompt", "a", "--acceptance", "none"],
        &["inspect", "docs"],
    ] {
        let (shown, piped) = (on_a_terminal(medusa(arguments)), in_a_pipe(medusa(arguments)));
        assert!(widest(&shown) <= COLUMNS.into(), "{shown}");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert!(widest(&piped) > COLUMNS.into(), "a line that is worth breaking: {piped}");
        let (mut shown, mut piped) = (words(&shown), words(&piped));
        shown.sort(); // stdout and stderr are one stream on the terminal
        piped.sort();
        assert_eq!(shown, piped);
    }
}

#[test]
fn json_is_one_line_on_a_terminal_too() {
    let shown = on_a_terminal(medusa(&["inspect", "data/tiny/backbone", "--json"]));
    assert_eq!(shown.lines().count(), 1, "{shown}");
}
