"""What a recipe will do to a checkpoint, known before any work."""
