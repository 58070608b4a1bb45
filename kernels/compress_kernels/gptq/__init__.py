"""What all implementations of GPTQ's column loop share."""
