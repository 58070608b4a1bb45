"""Graphs for onnxruntime-genai: ONNX Runtime's own operators, and the files beside them."""
