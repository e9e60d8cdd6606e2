//! What a tensor group encodes: the shares of its encoder replicas.

use dflop_types::EncoderShare;

/// The shares of one microbatch by tensor group: for each of the `groups` those of its encoder replicas, of which it has one
/// unless its ranks hold whole encoders.
pub(crate) fn by_group(
    encoder: &[Vec<EncoderShare>],
    groups: u32,
) -> impl ExactSizeIterator<Item = &[Vec<EncoderShare>]> {
    encoder.chunks((encoder.len() / groups.max(1) as usize).max(1))
}
