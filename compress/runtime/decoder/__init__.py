"""The decoder's layers over a paged key/value cache."""
