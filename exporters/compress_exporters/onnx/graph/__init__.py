"""A decoder as a graph, part by part."""
