//! Simulate: durations and action lists in, a timeline out.
