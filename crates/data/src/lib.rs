//! Measure: a dataset in, one shape a sample out, no pixel decoded.
