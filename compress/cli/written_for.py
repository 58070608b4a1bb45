"""What `export --to` takes, for its help and for a shell that completes it."""

from collections.abc import Mapping
from types import MappingProxyType

# What each of CODECS holds, said without the codecs, which import torch.
HOLDS: Mapping[str, str] = MappingProxyType(
    {
        "compressed-tensors": "every scheme but outlier columns; for transformers and vLLM",
        "gptq": "integers of 2, 3, 4 and 8 bits, inputs as they are",
        "gptq_v2": "the same, with any zero points",
        "awq": "integers of 4 bits in groups or rows, inputs as they are",
        "fp8": "8-bit floats in blocks, or with one scale a tensor",
        "modelopt": "FP8, NVFP4 weights, symmetric integers of 4 and 8 bits, caches",
        "bitsandbytes": "LLM.int8() only",
        "dense": "16- or 32-bit weights of anything, for any loader of the model",
    }
)
# The same of EXPORTERS.
TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "onnx": "a plain graph of opset 23, for ONNX Runtime, OpenVINO and whatever reads ONNX",
        "onnx-genai": "a graph of ONNX Runtime's own operators, as onnxruntime-genai runs it",
        "tensorrt": "a graph that TensorRT's parser takes, and the command that builds an engine",
        "gguf": "one file for llama.cpp, with codes as they are where its blocks hold them",
    }
)
