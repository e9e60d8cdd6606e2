//! A stage of either component, and the sizes that its modules are asked for.

use dflop_types::{EncoderSegments, Tower};

/// The layers that one stage of the LLM backbone holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageLayers {
    /// Layers of the stage.
    pub num_layers: u32,
    /// Whether it holds the embedding.
    pub is_first: bool,
    /// Whether it holds the final norm, the head and the loss.
    pub is_last: bool,
}

/// The layers that one stage of the encoder holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderLayers {
    /// The first of them, counted from 0.
    pub first_layer: u32,
    /// Layers of the stage.
    pub num_layers: u32,
    /// Whether it holds what stands before the layers: the patch embedding.
    pub is_first: bool,
    /// Whether it holds what stands behind them: the projector.
    pub is_last: bool,
}

/// The segments that this encoder reads.
pub(crate) fn segments_of(
    segments: &[EncoderSegments],
    tower: Tower,
) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    segments.iter().filter(move |s| s.tower == tower).map(|s| (u64::from(s.count), u64::from(s.tokens)))
}

pub(crate) fn samples_of(llm_tokens: &[u32]) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    llm_tokens.iter().map(|&tokens| (1, u64::from(tokens)))
}
