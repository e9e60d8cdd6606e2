//! The experts of a layer, counted apart from what stands beside them.

use serde::{Deserialize, Serialize};

/// The experts of one layer. Their parameters are among those of the layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertsProfile {
    /// How many there are; one that every token reads is none of them.
    pub count: u32,
    /// How many of them a token reads.
    pub per_token: u32,
    /// Number of parameters of all of them.
    pub num_parameters: u64,
    /// Bytes of these, in the dtype of the profile.
    pub parameter_bytes: u64,
}

impl ExpertsProfile {
    /// Adds what is wrong with the experts of a layer with so many parameters and bytes of them, each with its place.
    pub(super) fn check(&self, place: &str, of_layer: [u64; 2], problems: &mut Vec<String>) {
        let Self { count, per_token, num_parameters, parameter_bytes } = *self;
        if per_token == 0 || per_token > count {
            let rule = format!("must be from 1 to the {count} experts");
            problems.push(format!("{place}.experts.per_token: {per_token}, {rule}"));
        }
        let parts = [
            ("num_parameters", num_parameters, of_layer[0]),
            ("parameter_bytes", parameter_bytes, of_layer[1]),
        ];
        for (name, part, whole) in parts.into_iter().filter(|(_, part, whole)| part > whole) {
            problems
                .push(format!("{place}.experts.{name}: {part}, must be at most the {whole} of the layer"));
        }
    }
}
