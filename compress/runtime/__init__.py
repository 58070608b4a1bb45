"""The engine: a decoder of our own, a paged key/value cache and continuous batching."""
