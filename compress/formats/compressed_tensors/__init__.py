"""compressed-tensors: the layout of a weight both ways, and its config both ways."""
