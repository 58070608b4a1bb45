"""GGUF: one file for llama.cpp and what reads its format."""
