//! What the command prints: data on stdout, messages for people on stderr.
//!
//! The standard macros panic where their reader has gone, for example `dflop models | head -1`. Here a reader that left is
//! no fault: the verb goes on and its files are written. Any other failure of stdout, a full disk among them, is kept
//! and told at the end. Control characters, which names in a dataset may have, are written out; passwords and signatures
//! of URLs are left out.

use crate::Failure;
use dflop_types::shown_lines;
use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::Mutex;

/// The first failure of stdout that is not a reader that left.
static BROKEN: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes to stdout, as `print!` does.
macro_rules! out {
    ($($text:tt)*) => { $crate::speech::write_out(format_args!($($text)*)) };
}

/// Writes a line to stdout, as `println!` does.
macro_rules! outln {
    () => { $crate::speech::write_out(format_args!("\n")) };
    ($($text:tt)*) => { $crate::speech::write_out(format_args!("{}\n", format_args!($($text)*))) };
}

/// Writes a line to stderr, as `eprintln!` does.
macro_rules! talk {
    ($($text:tt)*) => { $crate::speech::write_talk(format_args!("{}\n", format_args!($($text)*))) };
}

pub(crate) fn write_out(text: Arguments<'_>) {
    keep(io::stdout().lock().write_all(shown_lines(&text.to_string()).as_bytes()));
}

/// Nobody is left to hear that stderr is gone.
pub(crate) fn write_talk(text: Arguments<'_>) {
    let _ = io::stderr().lock().write_all(shown_lines(&text.to_string()).as_bytes());
}

fn keep(written: io::Result<()>) {
    let Err(error) = written else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        return;
    }
    let mut broken = BROKEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    broken.get_or_insert(error);
}

/// What became of stdout since the last call: a failure where not all of it could be written.
pub(crate) fn end() -> Result<(), Failure> {
    keep(io::stdout().lock().flush());
    let mut broken = BROKEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    match broken.take() {
        None => Ok(()),
        Some(error) => Err(Failure::new(format!("cannot write to standard output: {error}"), None)),
    }
}
