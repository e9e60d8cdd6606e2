//! Measure: a dataset in, one shape a sample out, no pixel decoded.
//!
//! The crate is a few rooms. [`probe`] reads sizes and durations from the headers of media; [`readers`] read the
//! records of a [`mixture`]; [`family`] turns sizes into the encoder segments and feature tokens of a model family;
//! [`tokens`] counts the text of a [`conversation`]. [`profile::profile_into`] does all of this for every sample, and
//! [`dataset::Dataset`] reads the same samples again for training and holds them to what was profiled. [`table`] is
//! the profile's file, [`records`] says which record of the data each of its rows is, [`problems`] is the table of bad
//! samples beside it, [`merge`] makes one profile of the parts that several processes wrote. [`summary`] tells people
//! what a profile holds, [`diff`] what changed between two. [`demo`] makes data to try all of it on.
//!
//! # Rooms
//!
//! A room imports only the rooms that its row names, so that no two rooms import each other. `tests/test_tidy.py`
//! reads this table and compares the code with it. Every room may import the files at the root (`error`, `foreign`,
//! `digest`, `read_seek`, `width`, `yaml`); these import no room. Tests may import any room.
//!
//! | room | holds | may import |
//! |---|---|---|
//! | `media` | kinds of media, and what their headers say | |
//! | `source` | where records and media are: locations, stores, readers, the mixture | `media` |
//! | `family` | shape rules of model families, and the files of a model directory | `media` |
//! | `text` | conversations, chat templates, tokens | `media`, `source`, `family` |
//! | `table` | the data profile as a file: rows, problems, parts | `source` |
//! | `statistics` | what the samples of a profile come to | `table` |
//! | `profile` | the verb: records measured, and read again for training | `media`, `source`, `family`, `text`, `table`, `statistics` |
//! | `demo` | a made dataset and model | |

pub mod demo;
mod digest;
pub mod error;
pub mod family;
mod foreign;
mod listing;
mod media;
pub mod profile;
mod read_seek;
mod source;
mod statistics;
pub mod table;
mod text;
mod width;
pub mod yaml;

pub use error::DataError;
pub use family::model_files::{family_of, model_hashes, named_hashes};
pub use media::probe;
pub use profile::dataset;
pub use profile::measure::Media;
pub use read_seek::ReadSeek;
pub use source::{location, mixture, readers, store};
pub use statistics::{diff, estimate, summary, tally};
pub use table::{merge, problems, records};
pub use text::template::{render_templates_with, serve_templates};
pub use text::{conversation, tokens};
