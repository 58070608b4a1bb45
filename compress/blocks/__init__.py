"""Decoder blocks run one at a time through transformers' own modules."""
