"""A tokenizer in GGUF's words."""
