"""NVIDIA ModelOpt's FP8, INT4 and NVFP4."""
