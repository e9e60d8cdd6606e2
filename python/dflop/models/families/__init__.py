"""One file a model family: what training and profiling know of it; docs/families.md says how to add one."""
