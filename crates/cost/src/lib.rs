//! Predict: measured grids in, durations and bytes out.
//!
//! Two samples of a global batch may differ a hundredfold in work, and the difference is known before a pixel
//! is decoded: it is a few integers, the shape. [`CostModel`] turns shapes into nanoseconds and bytes through
//! curves that `dflop profile model` measured, one for what is linear in tokens and one for attention, module
//! by module. Its neighbours are [`Curve`], which answers for one grid and marks what it was not measured
//! for, and [`memory`], which adds up what a rank must hold.
//!
//! ```
//! use dflop_cost::CostModel;
//! use dflop_types::{MeasuredCurve, MeasuredPoint, MicrobatchShape, ModelProfile, ModuleProfile};
//!
//! let point = |size, forward_ns| MeasuredPoint {
//!     size, forward_ns, backward_ns: 2 * forward_ns, spread_ns: 0, activation_bytes: 8 * size, repeats: 5,
//! };
//! let linear = MeasuredCurve { points: vec![point(100, 1_000), point(200, 2_000)] };
//! let module = ModuleProfile { linear, ..ModuleProfile::default() };
//! let mut profile = ModelProfile { num_llm_layers: 2, ..ModelProfile::default() };
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
//! *Not modelled*: tensor parallelism, recomputation, frozen modules (a curve measured with them frozen is
//! right), collectives other than the boundary, contention.
//!
//! *References*: DFLOP, arXiv 2603.25120, section on profiling; `docs/cost_model.md`.

mod cost;
mod error;
mod grid;
pub mod memory;
mod network;
mod work;

pub use cost::{CostModel, Prediction, Repair, StageLayers, Typical};
pub use error::CostError;
pub use grid::{Curve, GridError, Reading};
pub use memory::{
    MemoryError, MemorySettings, Moment, RankMemory, RankMicrobatch, RankPart, RankSteps,
    microbatches_in_flight,
};
pub use work::WorkMin;
