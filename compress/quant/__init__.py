"""How numbers are stored: schemes, quantized tensors, rounding and packing primitives."""
