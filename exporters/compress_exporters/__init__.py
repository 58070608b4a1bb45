"""Exporters: artifacts for other runtimes, made of one arch-neutral description of a checkpoint."""

import os

# ONNX Runtime 1.31 reports its use to its maker from the moment it is imported: it gives the
# machine a number, keeps both in the user's cache, and leaves .ses in TMPDIR. It reads this then.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
