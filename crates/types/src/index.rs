//! Positions, each with a type of its own so that a stage cannot be passed for a rank.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The position as an array index.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// Position of a sample in its data profile, from 0: the same in every epoch.
    SampleIndex
}
index! {
    /// Position of a stage in the step: 0 is the encoder, 1 the first stage of the LLM backbone.
    StageIndex
}
index! {
    /// A process, as torchrun numbers it, from 0.
    Rank
}
