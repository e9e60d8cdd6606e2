//! Estimate: a model's configuration and a device in, a model profile out, nothing measured.
//!
//! A plan for a cluster that is not there yet needs times that nobody can measure. This crate counts the work of a
//! model and divides it by the rates that the vendor of a device publishes, so that `dflop plan` and `dflop simulate`
//! can answer without the device. [`Architecture`] says what a model is made of; [`Module`] counts floating point
//! operations as `torch.utils.flop_counter` does, parameters and bytes; [`Hardware`] has peak rates, each with its
//! source; [`estimate`] puts them together into a model profile that is marked as estimated.
//!
//! *Not modelled*: see `docs/analytic.md`, which says what is counted and what is assumed.

mod adapters;
mod architecture;
mod backbone;
mod catalogue;
mod defaults;
mod delta_rule;
mod error;
mod estimate;
mod fields;
mod gpt;
mod hardware;
mod links;
mod mean;
mod measured;
mod merger;
mod modules;
mod operations;
mod pass;
mod product;
mod projector;
mod read;
mod roofline;
mod short_conv;
mod utilization;
mod work;

pub use architecture::{
    Architecture, CONV_LAYER, DENSE_LAYER, Encoder, LINEAR_LAYER, LinearAttention, Llm, MERGED_LAYER,
    MlpKind, NormKind, Patches, Projector, Router, SLIDING_LAYER, ShortConv, SlidingAttention, WindowMerger,
};
pub use catalogue::{CatalogueModel, catalogue, catalogue_model};
pub use error::AnalyticError;
pub use estimate::{EstimateSettings, estimate, estimate_gpt};
pub use gpt::{Gpt, Software};
pub use hardware::{EFFICIENCY, Efficiency, HARDWARE, Hardware, Vendor};
pub use measured::Measured;
pub use modules::{Module, ModuleFlops};
pub use operations::{Attention, Kind, Operation, Rows};
pub use pass::Pass;
pub use product::{Cut, Product};
pub use read::FAMILIES;
pub use utilization::mfu;
pub use work::{Phase, Work};
