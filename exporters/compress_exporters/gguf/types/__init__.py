"""Which type each tensor of a file takes."""
