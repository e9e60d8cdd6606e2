//! Repairs: measured points that fell with the size, which a curve does not do.

/// Points of one curve that had to be repaired because a larger size was measured faster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repair {
    /// The module, for example `llm_layer`; `network` for messages.
    pub module: &'static str,
    /// `linear` or `attention`; the collective, for example `all_reduce`, for messages.
    pub part: &'static str,
    /// `forward`, `backward`, `input`, `weight`, `recompute` or `activation`; `time` for messages.
    pub phase: &'static str,
    /// Points replaced.
    pub num_points: u32,
}
