"""Names of a graph's files, told without the packages that make one."""

MODEL, DATA = "model.onnx", "model.onnx.data"
# A graph beside the checkpoint's weights, which nobody is to open yet.
UNPROVED = "model.partial.onnx"
# Where it takes the place of another one: until the rename each has its own weights.
SECOND = "model.onnx.data.2"
