//! Schedule: samples with durations in, balanced microbatches out.
