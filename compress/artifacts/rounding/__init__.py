"""Weights rounded into llama.cpp's blocks by what they read of a text, block by block."""
