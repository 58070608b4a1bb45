"""ONNX graphs, built from ForwardSpec node by node: nothing is traced."""
