"""Records of report.json that have a file of their own; the others are in schema.py."""
