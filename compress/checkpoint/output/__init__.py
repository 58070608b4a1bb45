"""OUT: built beside its place, published by one rename, replaced only where it is ours."""
