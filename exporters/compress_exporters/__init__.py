"""Exporters: artifacts for other runtimes, made of one arch-neutral description of a checkpoint."""
