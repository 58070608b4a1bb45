"""From a checkpoint to an engine that has proved its bits."""
