//! Sources: where records and media are, and how they are read from there.

pub mod location;
pub mod mixture;
pub(crate) mod parquet_file;
pub mod readers;
pub mod store;
pub(crate) mod unread;
