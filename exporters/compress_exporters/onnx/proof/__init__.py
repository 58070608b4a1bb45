"""Whether a graph computes what the checkpoint computes, in ONNX Runtime and OpenVINO."""
