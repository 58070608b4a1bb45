"""Files of other runtimes, made of a checkpoint and proved."""
