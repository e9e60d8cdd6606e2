//! The header of a page of a Parquet file, looked at before its decoder makes room for what the page claims to hold.
//!
//! The decoder trusts the claim: a page of 33 kilobytes may hold a gigabyte of one letter. Texts and tables shrink to a
//! tenth or a fiftieth, media hardly at all; and one row has at most 64 MiB of text.

use super::footer::Compact;

/// Bytes that a page may claim to have unpacked, whatever its size, and for each packed byte; as a packed buffer of Arrow.
const UNPACKED_BYTES: (i64, i64) = (64 << 20, 64);

/// The fields of a header that hold the bytes of the page, unpacked and packed.
const UNPACKED: i16 = 2;
const PACKED: i16 = 3;

/// Nothing where `bytes`, which begin with the header of a page, claim no absurd size. Bytes that begin with no header are
/// for the decoder to refuse.
///
/// # Errors
/// What the page claims, and what it may.
pub(super) fn check_head(bytes: &[u8]) -> Result<(), String> {
    match sizes(bytes) {
        Some((unpacked, packed)) => check(unpacked, packed),
        None => Ok(()),
    }
}

/// The same of `bytes` that may be a page with its header, or anything else.
///
/// # Errors
/// As of [`check_head`].
pub(super) fn check_whole(bytes: &[u8]) -> Result<(), String> {
    let mut rest = Compact { bytes };
    let is_header = rest.fields(|rest, _, kind| rest.skip_value(kind, 0)).is_ok();
    match sizes(bytes) {
        // No other bytes have the length that they claim behind a header.
        Some((unpacked, packed)) if is_header && usize::try_from(packed) == Ok(rest.bytes.len()) => {
            check(unpacked, packed)
        }
        _ => Ok(()),
    }
}

/// The bytes of a page, unpacked and packed, as its header says.
fn sizes(bytes: &[u8]) -> Option<(i64, i64)> {
    let (mut unpacked, mut packed) = (None, None);
    let mut rest = Compact { bytes };
    // What follows both sizes may be cut off, and does not matter.
    let _ = rest.fields(|rest, field, kind| match (field, kind) {
        (UNPACKED, Compact::I32) => rest.signed().map(|bytes| unpacked = Some(bytes)),
        (PACKED, Compact::I32) => rest.signed().map(|bytes| packed = Some(bytes)),
        _ => rest.skip_value(kind, 0),
    });
    unpacked.zip(packed)
}

fn check(unpacked: i64, packed: i64) -> Result<(), String> {
    let limit = UNPACKED_BYTES.1.saturating_mul(packed.max(0)).saturating_add(UNPACKED_BYTES.0);
    if unpacked <= limit {
        return Ok(());
    }
    Err(format!("a page of {packed} packed bytes claims {unpacked} unpacked, must be at most {limit}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header: field 1 (type), 2 (bytes unpacked), 3 (bytes packed), each a number of one or more groups of seven bits.
    fn header(unpacked: u64, packed: u64) -> Vec<u8> {
        let mut bytes = vec![0x15, 0];
        for number in [unpacked, packed] {
            bytes.push(0x15);
            let mut rest = number * 2;
            while rest >= 0x80 {
                bytes.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            bytes.push(rest as u8);
        }
        bytes.push(0);
        bytes
    }

    #[test]
    fn a_page_claims_no_more_than_its_bytes_are_worth() {
        const GIB: u64 = 1 << 30;
        assert_eq!(check_head(&header(64 << 20, 0)), Ok(()));
        let refused =
            Err("a page of 33000 packed bytes claims 1073741824 unpacked, must be at most 69220864"
                .to_owned());
        assert_eq!(check_head(&header(GIB, 33_000)), refused);
        assert_eq!(check_head(&header(GIB, 1 << 24)), Ok(()));
        // The page is sound with its own bytes. With fewer or more bytes than it claims it must be refused.
        let mut page = header(GIB, 33_000);
        page.resize(page.len() + 33_000, 7);
        assert_eq!(check_whole(&page), refused);
        page.pop();
        assert_eq!(check_whole(&page), Ok(()));
        assert_eq!((check_head(b""), check_head(b"\xff\xff"), check_whole(b"")), (Ok(()), Ok(()), Ok(())));
        // Cut behind the sizes.
        let long = header(GIB, 33_000);
        assert_eq!(check_head(&long[..long.len() - 1]), refused);
    }
}
