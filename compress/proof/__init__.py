"""Proves that plain transformers loads a checkpoint that we wrote, in a process of its own."""
