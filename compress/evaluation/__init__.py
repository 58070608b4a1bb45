"""Perplexity, KL divergence and top-1 agreement of a result against its source, block-streamed."""
