//! One shape rule a model family: sizes in, encoder segments and feature tokens out.
//!
//! A rule equals, integer for integer, what the family's Hugging Face processor and model produce.

mod llava_onevision;

pub use llava_onevision::LlavaOnevision;

use dflop_types::EncoderSegments;

/// What one image or video costs: what the encoder reads of it, and the LLM positions it fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MediaShape {
    /// Tiles of `pixel_values`, base tile included; frames of a video.
    pub num_tiles: u32,
    /// What the encoder reads: one segment a tile.
    pub segments: EncoderSegments,
    /// LLM tokens it fills, newline tokens included.
    pub feature_tokens: u32,
}
