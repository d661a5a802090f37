//! Gives the terminal back where a signal ends the program at the prompt: the line editor has it in raw mode.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// From here on, SIGTERM and SIGINT restore the terminal and end the program, while `is_editing`.
///
/// # Errors
/// stdin is no terminal, or the handlers cannot be installed.
pub(super) fn at_signals(is_editing: Arc<AtomicBool>) -> std::io::Result<()> {
    use std::io::{self, Write};

    use nix::sys::termios::{SetArg, tcgetattr, tcsetattr};

    use crate::cli::signals;

    /// Ends bracketed paste, which the editor begins at each prompt, and the line.
    const END_OF_EDITING: &[u8] = b"\x1b[?2004l\r\n";

    let modes = tcgetattr(io::stdin())?;
    signals::before_the_end(is_editing, move || {
        let _ = io::stdout().write_all(END_OF_EDITING).and_then(|()| io::stdout().flush()); // the program ends anyway
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &modes); // as above
    })
}
