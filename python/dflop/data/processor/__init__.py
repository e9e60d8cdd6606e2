"""A shape rule that asks the processor of transformers, for any model that has one."""
