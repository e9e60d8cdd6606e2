//! Predict: measured grids in, durations and bytes out.
