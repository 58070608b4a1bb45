"""Blocks of llama.cpp: what they hold, where each bit lies, and how scales are found."""
