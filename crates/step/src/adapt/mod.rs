//! Adapt: what measured steps say of the predictions, and how later schedules use it.
//!
//! ```text
//! spans of a step -> observed ratios -> rows (rank and kind of action): hardware
//!                                    -> fit (component and shape bin): data
//!                    both -> adjustment, in whole thousandths -> costs, balance and simulator of the next schedules
//! ```

pub(crate) mod adjustment;
pub(crate) mod bins;
pub(crate) mod correction;
pub(crate) mod fit;
pub(crate) mod learned;
pub(crate) mod live;
pub(crate) mod packs;
pub(crate) mod ranges;
pub(crate) mod rows;
pub(crate) mod shape_times;
pub(crate) mod tail;
pub(crate) mod watch;
