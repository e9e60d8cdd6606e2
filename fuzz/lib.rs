//! What every target of a header reader checks: no panic, and an answer that keeps the rules of its kind.

use dflop_data::DataError;
use dflop_data::probe::{MediaKind, probe_bytes};
use std::path::Path;

/// Reads `start` and then `noise` as a media file; `start` leads to the reader under test.
pub fn probe(start: &[u8], noise: &[u8]) {
    let bytes = if noise.starts_with(start) { noise.to_vec() } else { [start, noise].concat() };
    match probe_bytes(Path::new("file"), &bytes) {
        Ok(found) => {
            assert_eq!(found.bytes, bytes.len() as u64);
            assert_eq!(found.width.is_some(), found.kind != MediaKind::Audio, "{found:?}");
            assert!(found.width != Some(0) && found.height != Some(0), "{found:?}");
            assert!(found.frames != Some(0), "{found:?}");
            assert!(found.duration_s.is_none_or(|s| s.is_finite() && s > 0.0), "{found:?}");
            assert!(found.fps.is_none_or(|fps| fps.is_finite() && fps > 0.0), "{found:?}");
        }
        Err(DataError::Media { .. } | DataError::UnknownFormat { .. }) => {}
        Err(other) => panic!("bytes in memory give no other error: {other}"),
    }
}
