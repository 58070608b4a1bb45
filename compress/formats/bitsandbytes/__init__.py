"""bitsandbytes' LLM.int8(), and the side file of outlier columns."""
