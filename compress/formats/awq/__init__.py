"""AWQ in its GEMM layout."""
