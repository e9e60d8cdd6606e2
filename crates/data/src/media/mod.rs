//! Media: their kinds, what their headers say, and what decoders take.

pub(crate) mod decoder;
mod kind;
pub mod probe;

pub use kind::MediaKind;
