"""How a decoder computes, as data: attention, rotations, windows, norms."""
