//! Measure: a dataset in, one shape a sample out, no pixel decoded.
//!
//! [`probe`] reads sizes and durations from headers, [`family`] turns them into the encoder segments and feature
//! tokens of a model family, and [`tokens`] counts the text. [`profile::profile_into`] does so for every sample of a
//! [`mixture`]; [`dataset::Dataset`] reads the same samples again for training and holds them to what was profiled;
//! [`table`] is the profile's file, [`records`] says which record of the data each row is, [`problems`] the table of bad samples beside it, [`merge`] makes one of the parts that
//! several processes wrote, [`diff`] says what changed; [`summary`] says it to people; [`demo`] makes data to try it on; [`yaml`]
//! loads what people write.

mod chunks;
pub mod conversation;
pub mod dataset;
mod decision;
pub mod demo;
pub mod diff;
pub mod error;
pub mod estimate;
pub mod family;
mod foreign;
pub mod location;
mod measure;
pub mod merge;
pub mod mixture;
mod model_files;
mod parquet_source;
mod previous;
pub mod probe;
pub mod problems;
pub mod profile;
pub mod readers;
pub mod records;
mod selection;
pub mod store;
pub mod summary;
pub mod table;
pub mod tally;
mod template;
pub mod tokens;
mod unread;
mod width;
pub mod yaml;

pub use error::DataError;
pub use measure::{Media, MediaUse};
pub use model_files::{family_of, model_hashes};
