"""What attention over heads becomes when all its keys and values are made of one latent."""
