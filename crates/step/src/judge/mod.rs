//! Judge: the time and the memory that a schedule is predicted to take, and how measured steps compare with that.

pub(crate) mod critical;
pub(crate) mod memory;
pub(crate) mod outlier;
pub(crate) mod peaks;
pub(crate) mod predict;
pub(crate) mod timeline;
pub(crate) mod work;
