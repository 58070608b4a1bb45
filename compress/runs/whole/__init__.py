"""A result that is one file, as it is made."""
