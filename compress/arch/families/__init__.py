"""The tables of families: what tensors are called, and what they are for."""
