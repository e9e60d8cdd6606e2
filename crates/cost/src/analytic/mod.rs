//! The analytic model: what a model costs on a device that nobody has measured, from integers and a table.
//!
//! [`Architecture`] says what a model is made of; [`Module`] counts floating point operations as
//! `torch.utils.flop_counter` does, parameters and bytes; [`Hardware`] has peak rates, each with its source;
//! [`estimate`] puts them together into a model profile that is marked as estimated.

mod architecture;
mod catalogue;
mod defaults;
mod error;
mod fields;
mod hardware;
mod modules;
mod operations;
mod read;
mod roofline;

pub use architecture::{Architecture, Encoder, Llm, MlpKind, NormKind, Patches, Projector};
pub use catalogue::{CatalogueModel, catalogue, catalogue_model};
pub use error::AnalyticError;
pub use hardware::{EFFICIENCY, Efficiency, HARDWARE, Hardware, Vendor};
pub use modules::{Module, ModuleFlops};
pub use operations::{Attention, Cut, Kind, Operation, Pass, Phase, Product, Rows, Work};
pub use read::FAMILIES;
pub use roofline::{EstimateSettings, estimate};
