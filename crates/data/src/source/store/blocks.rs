//! The bytes of a medium that show whether its content changed or it was only copied, without reading all of it.

use super::Opened;
use std::io::{self, Read, Seek, SeekFrom};

/// Bytes of one block.
const BLOCK_BYTES: u64 = 4096;
/// Blocks of a medium that is larger than all of them together.
const NUM_BLOCKS: u64 = 4;
/// A medium up to this size counts whole.
const WHOLE_BYTES_MAX: u64 = BLOCK_BYTES * NUM_BLOCKS;

/// What the data profile says of the way contents are sampled: another way gives other hashes.
pub(crate) const SAMPLING: &str = "4 blocks of 4096 bytes; of a remote medium its first 4096 bytes";

/// The bytes of an open medium that count: all of a small one; else four blocks of 4 KiB, its first and its last among
/// them, at equal distances. Of a remote one the first block alone: it comes with the header, the others would cost a
/// request each, and the store's tag distinguishes versions.
///
/// # Errors
/// Those of the reader.
pub(super) fn sample(opened: &mut Opened, is_remote: bool) -> io::Result<Vec<u8>> {
    let mut sampled = Vec::new();
    let reader = &mut opened.reader;
    if is_remote || opened.len <= WHOLE_BYTES_MAX {
        let bytes = if is_remote { BLOCK_BYTES } else { WHOLE_BYTES_MAX };
        reader.take(bytes).read_to_end(&mut sampled)?;
        return Ok(sampled);
    }
    for block in 0..NUM_BLOCKS {
        reader.seek(SeekFrom::Start(start_of(block, opened.len)))?;
        reader.take(BLOCK_BYTES).read_to_end(&mut sampled)?;
    }
    Ok(sampled)
}

/// Where a block of a medium of `len` bytes begins; they do not overlap.
fn start_of(block: u64, len: u64) -> u64 {
    let last = len - BLOCK_BYTES;
    // Divided first: `len` may be near the end of its type.
    last / (NUM_BLOCKS - 1) * block + last % (NUM_BLOCKS - 1) * block / (NUM_BLOCKS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn sampled(bytes: &[u8], is_remote: bool) -> Vec<u8> {
        let reader = Box::new(Cursor::new(bytes.to_vec()));
        let mut opened = Opened { reader, len: bytes.len() as u64, version: String::new() };
        sample(&mut opened, is_remote).unwrap()
    }

    /// The first block begins at 0, the last ends with the medium, and no byte counts twice.
    #[test]
    fn blocks_reach_from_end_to_end() {
        for len in [WHOLE_BYTES_MAX + 1, WHOLE_BYTES_MAX + 2, 1 << 20, 1_234_567, u64::MAX] {
            let starts: Vec<_> = (0..NUM_BLOCKS).map(|block| start_of(block, len)).collect();
            assert_eq!((starts[0], starts[3]), (0, len - BLOCK_BYTES));
            assert!(starts.windows(2).all(|pair| pair[1] >= pair[0] + BLOCK_BYTES), "{len}: {starts:?}");
        }
    }

    /// Any byte of a small medium; of a large one a byte of each block.
    #[test]
    fn a_changed_byte_is_seen_where_the_rule_says() {
        for len in [1, 4096, 4097, WHOLE_BYTES_MAX as usize] {
            let mut bytes = vec![7; len];
            assert_eq!(sampled(&bytes, false), bytes);
            bytes[len - 1] = 8;
            assert_eq!(sampled(&bytes, false).last(), Some(&8));
        }
        let len = 1_000_000;
        let plain = sampled(&vec![7; len], false);
        for block in 0..NUM_BLOCKS {
            let mut bytes = vec![7; len];
            bytes[start_of(block, len as u64) as usize + 9] = 8;
            assert_ne!(sampled(&bytes, false), plain);
        }
        assert_eq!(sampled(&vec![7; len], true).len(), 4096);
    }
}
