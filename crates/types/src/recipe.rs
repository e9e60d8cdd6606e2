//! What trains: the parts of the model, and the names that `dflop.yaml` has for the usual choices of them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The parts of a model that train; all else is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Trained {
    /// The encoder without its projector.
    pub encoder: bool,
    /// The projector.
    pub projector: bool,
    /// The LLM backbone, or its adapters.
    pub llm: bool,
    /// Rank of the `LoRA` adapters of the LLM backbone, which alone train in it; 0: none, all of it trains.
    #[serde(default)]
    pub lora_rank: u32,
}

impl Default for Trained {
    fn default() -> Self {
        Self { encoder: true, projector: true, llm: true, lora_rank: 0 }
    }
}

impl Trained {
    /// Whether all of the model trains, which files leave out.
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Trained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let llm = if self.lora_rank > 0 { format!("LoRA {}", self.lora_rank) } else { "llm".to_owned() };
        let parts = [(self.encoder, "encoder"), (self.projector, "projector"), (self.llm, llm.as_str())];
        let names: Vec<&str> = parts.into_iter().filter(|part| part.0).map(|part| part.1).collect();
        f.write_str(&names.join(", "))
    }
}

/// A usual choice of what trains. The projector always does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// All of it.
    #[default]
    Full,
    /// The projector alone.
    Projector,
    /// The projector and the LLM backbone.
    FrozenEncoder,
    /// The encoder and the projector.
    FrozenLlm,
    /// The projector, and `LoRA` adapters of the LLM backbone.
    Lora,
}

impl Recipe {
    /// Every recipe.
    pub const ALL: [Self; 5] =
        [Self::Full, Self::Projector, Self::FrozenEncoder, Self::FrozenLlm, Self::Lora];

    /// Rank of the adapters where nobody says.
    pub const LORA_RANK: u32 = 16;

    /// The parts that train; `lora_rank` is that of the adapters, where there are any.
    pub const fn trained(self, lora_rank: u32) -> Trained {
        let (encoder, llm) = match self {
            Self::Full => (true, true),
            Self::Projector => (false, false),
            Self::FrozenEncoder | Self::Lora => (false, true),
            Self::FrozenLlm => (true, false),
        };
        let lora_rank = if matches!(self, Self::Lora) { lora_rank } else { 0 };
        Trained { encoder, projector: true, llm, lora_rank }
    }

    /// As files write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Projector => "projector",
            Self::FrozenEncoder => "frozen-encoder",
            Self::FrozenLlm => "frozen-llm",
            Self::Lora => "lora",
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recipe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|recipe| recipe.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.into_iter().map(Self::name).collect();
            format!("recipe `{text}`, must be one of: {}", names.join(", "))
        })
    }
}
