"""Where a result goes besides its folder: to the Hugging Face hub, and its numbers to trackers."""
