//! Calls of other crates' decoders, so that our promise holds: a damaged file is an error.
//!
//! The decoders of Arrow, Parquet, tokenizers and templates check most of what they read, and panic on the rest: a division
//! by a count of zero, an offset cut in the middle, a number too large for its type. We could check all of this before only
//! with a decoder of our own. So every call of such a decoder goes through [`guarded`].

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// How many calls of [`guarded`] this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// One call of [`guarded`] under way.
struct Guard;

impl Guard {
    fn new() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// What `decode` answers, its error as text; a panic is an error too. What the decoder held is dropped then.
///
/// A panic of another crate is not reported as the bug that it is elsewhere, by a message and the stack; one of our own
/// code that runs inside, a filter of a template say, still is.
///
/// # Errors
/// What the decoder says.
pub(crate) fn guarded<T, E: fmt::Display>(decode: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        let ours = file!().trim_end_matches("foreign.rs");
        set_hook(Box::new(move |panic| {
            let is_ours = panic.location().is_some_and(|place| place.file().starts_with(ours));
            if DEPTH.get() == 0 || is_ours {
                report(panic);
            }
        }));
    });
    let guard = Guard::new();
    let answer = catch_unwind(AssertUnwindSafe(decode));
    drop(guard);
    match answer {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("the code that reads it gave up: {}", message(panic.as_ref()))),
    }
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it does not say why")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_that_says_why() {
        let zero = std::hint::black_box(0);
        let found = guarded(|| guarded(|| Ok::<i32, String>(1 / zero)));
        assert_eq!(found.unwrap_err(), "the code that reads it gave up: attempt to divide by zero");
        assert_eq!(DEPTH.get(), 0);
        assert_eq!(guarded(|| Err::<(), _>("odd")), Err("odd".to_owned()));
        assert_eq!(guarded(|| Ok::<_, String>(7)), Ok(7));
    }
}
