"""Requests, the texts that they become, and the blocks of the cache that each text holds."""
