"""Compiled C++ for the CPU, built on first use; the references stand in where it cannot be built."""
