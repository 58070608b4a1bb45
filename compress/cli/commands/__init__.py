"""One command a file: its options, one call, what is printed."""
