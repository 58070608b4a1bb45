"""GGUF: the file that llama.cpp reads: which tensor becomes which, in which blocks."""
