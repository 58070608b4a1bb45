"""Compiled C++ for the CPU, built on first use; where that fails the references stand in."""
