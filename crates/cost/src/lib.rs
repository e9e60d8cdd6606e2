//! Predict: measured grids in, durations and bytes out.
//!
//! Two samples of a global batch may differ a hundredfold in work, and the difference is known before a pixel is
//! decoded: it is a few integers, the shape. [`CostModel`] turns shapes into nanoseconds and bytes through curves
//! that `dflop profile model` measured, one for what is linear in tokens and one for attention, module by module.
//! Beside it stand [`Curve`], which answers for one grid and marks answers outside the measured range, and
//! [`memory`], which adds up what a rank must hold.
//!
//! ```
//! use dflop_cost::CostModel;
//! use dflop_types::{MeasuredCurve, MeasuredPoint, MicrobatchShape, ModelProfile, ModuleProfile};
//!
//! let point = |size, forward_ns| MeasuredPoint {
//!     size,
//!     forward_ns,
//!     backward_ns: 2 * forward_ns,
//!     input_ns: forward_ns,
//!     weight_ns: forward_ns,
//!     repeats: 5,
//!     ..MeasuredPoint::default()
//! };
//! let linear = MeasuredCurve { points: vec![point(100, 1_000), point(200, 2_000)], ..MeasuredCurve::default() };
//! let module = ModuleProfile { count: 2, linear, ..ModuleProfile::default() };
//! let mut profile = ModelProfile::default();
//! profile.device.dtype = "float32".to_owned();
//! for name in ModelProfile::MODULES {
//!     profile.modules.insert(name.to_owned(), module.clone());
//! }
//! let model = CostModel::new(&profile)?;
//! let microbatch = MicrobatchShape { llm_tokens: vec![90, 60], ..MicrobatchShape::default() };
//! let stage = model.llm_stage(&microbatch, 2, false, false);
//! assert_eq!((stage.forward_ns, stage.backward_ns, stage.extrapolated), (3_000, 6_000, false));
//! # Ok::<(), dflop_cost::CostError>(())
//! ```
//!
//! [`CostSettings`] says how the model is run: what trains, what is recomputed, and over how many ranks a layer is
//! cut. [`Sharding`] says what of a component its replicas keep only a part of.
//!
//! *Not modelled*: contention.
//!
//! *References*: DFLOP, arXiv 2603.25120, section on profiling; `docs/cost_model.md`.

mod choice;
mod cost;
mod dealt;
mod error;
mod experts;
mod grid;
mod held;
pub mod memory;
mod mode;
mod module;
mod network;
mod phases;
mod prediction;
mod repair;
mod sample;
mod settings;
mod sharding;
mod stage;
mod transfers;
mod work;

pub use cost::CostModel;
pub use dflop_types::Trained;
pub use error::CostError;
pub use grid::{Curve, GridError, Growth, Reading};
pub use memory::{
    ColocatedMemory, MemoryError, Moment, RankChunks, RankMemory, RankMicrobatch, RankRole, RankSteps,
    microbatches_in_flight, openings_ahead,
};
pub use network::{Basis, Transfer};
pub use prediction::Prediction;
pub use repair::Repair;
pub use sample::Typical;
pub use settings::{ComponentSettings, CostSettings};
pub use sharding::{ColocatedSharding, Sharding};
pub use stage::{EncoderLayers, StageLayers};
pub use work::WorkMin;
