"""Graphs that TensorRT's ONNX parser takes, and the proof of it without a GPU."""
