"""What TensorRT's parser takes of a graph, as rules."""
