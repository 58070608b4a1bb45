"""The version, in a module of its own: what imports it needs nothing else of the package."""

VERSION = "0.1.0"
