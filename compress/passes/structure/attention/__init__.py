"""What structural stages do to attention: heads that share, and norms of queries and keys."""
