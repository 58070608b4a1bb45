"""Changes of a decoder's sizes: what becomes of config.json, and of each tensor."""
