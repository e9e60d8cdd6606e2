//! Layouts: how many ways each component is split, and which rank holds which piece.

use crate::index::{Rank, StageIndex};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One half of a multimodal model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// Turns pixels or sound into features; the projector belongs to it.
    Encoder,
    /// The LLM backbone.
    Llm,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Encoder => "encoder",
            Self::Llm => "llm",
        })
    }
}

/// The degrees of one component, each at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComponentLayout {
    /// Tensor-parallel degree: ranks that share each layer.
    #[serde(rename = "tensor_parallel_degree")]
    pub tp: u32,
    /// Pipeline-parallel degree: stages of the component.
    #[serde(rename = "pipeline_parallel_degree")]
    pub pp: u32,
    /// Data-parallel degree: replicas of the component.
    #[serde(rename = "data_parallel_degree")]
    pub dp: u32,
}

impl ComponentLayout {
    /// Ranks the component takes: `tp * pp * dp`.
    pub const fn num_ranks(&self) -> u32 {
        self.tp * self.pp * self.dp
    }
}

impl fmt::Display for ComponentLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} pp {} dp {}", self.tp, self.pp, self.dp)
    }
}

/// Encoder ranks and LLM ranks apart. The encoder's ranks come first, then the LLM's, replica by replica;
/// within a replica the pipeline stages follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Layout {
    /// Degrees of the encoder.
    pub encoder: ComponentLayout,
    /// Degrees of the LLM backbone.
    pub llm: ComponentLayout,
}

/// Where a rank stands: its component, replica and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// The component the rank holds a piece of.
    pub component: Component,
    /// Replica of that component, from 0.
    pub replica: u32,
    /// Stage in the whole step: the encoder's are first.
    pub stage: StageIndex,
}

impl Layout {
    /// Ranks of both components.
    pub const fn num_ranks(&self) -> u32 {
        self.encoder.num_ranks() + self.llm.num_ranks()
    }

    /// Number of stages a microbatch passes: the encoder's stages, then the LLM backbone's.
    pub const fn num_stages(&self) -> u32 {
        self.encoder.pp + self.llm.pp
    }

    /// The rank of `replica` and `stage`, for layouts without tensor parallelism.
    pub const fn rank(&self, replica: u32, stage: StageIndex) -> Rank {
        if stage.0 < self.encoder.pp {
            Rank(replica * self.encoder.pp + stage.0)
        } else {
            Rank(self.encoder.num_ranks() + replica * self.llm.pp + (stage.0 - self.encoder.pp))
        }
    }

    /// Where `rank` stands, for layouts without tensor parallelism; `None` past the last rank.
    pub fn coordinates(&self, rank: Rank) -> Option<Coordinates> {
        let encoder_ranks = self.encoder.num_ranks();
        if rank.0 < encoder_ranks {
            Some(Coordinates {
                component: Component::Encoder,
                replica: rank.0 / self.encoder.pp,
                stage: StageIndex(rank.0 % self.encoder.pp),
            })
        } else if rank.0 < self.num_ranks() {
            let position = rank.0 - encoder_ranks;
            Some(Coordinates {
                component: Component::Llm,
                replica: position / self.llm.pp,
                stage: StageIndex(self.encoder.pp + position % self.llm.pp),
            })
        } else {
            None
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "encoder {}, llm {}", self.encoder, self.llm)
    }
}

/// Layers of each stage when `num_layers` are cut into `num_stages` runs, the longer runs first.
///
/// The last stage also holds the head, so where the cut is uneven it gets the shorter run.
///
/// # Panics
/// If `num_stages` is 0.
pub fn cut_layers(num_layers: u32, num_stages: u32) -> Vec<u32> {
    assert!(num_stages > 0, "a component has at least one stage");
    (0..num_stages)
        .map(|stage| num_layers / num_stages + u32::from(stage < num_layers % num_stages))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_and_coordinates_are_inverse(e_dp in 1u32..5, l_dp in 1u32..5, l_pp in 1u32..5) {
            let layout = Layout {
                encoder: ComponentLayout { tp: 1, pp: 1, dp: e_dp },
                llm: ComponentLayout { tp: 1, pp: l_pp, dp: l_dp },
            };
            for rank in 0..layout.num_ranks() {
                let at = layout.coordinates(Rank(rank)).unwrap();
                prop_assert_eq!(layout.rank(at.replica, at.stage), Rank(rank));
            }
            prop_assert_eq!(layout.coordinates(Rank(layout.num_ranks())), None);
        }

        #[test]
        fn every_layer_is_in_one_stage(layers in 1u32..100, stages in 1u32..12) {
            let cut = cut_layers(layers, stages);
            prop_assert_eq!(cut.iter().sum::<u32>(), layers);
            prop_assert!(cut.iter().max().unwrap() - cut.iter().min().unwrap() <= 1);
        }
    }
}
