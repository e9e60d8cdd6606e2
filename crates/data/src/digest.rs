//! Digests that are kept as one number.

/// The first eight bytes of a SHA-256.
pub(crate) fn first_eight(digest: &[u8]) -> u64 {
    u64::from_be_bytes(digest[..8].try_into().expect("a SHA-256 has 32 bytes"))
}
