"""The passes that train a model by the one that the run was given: block by block, or whole."""
