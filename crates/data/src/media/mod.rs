//! Media: their kinds, and what their headers say.

mod kind;
pub mod probe;

pub use kind::MediaKind;
