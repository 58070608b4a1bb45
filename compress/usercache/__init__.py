"""What was made of a model once and is made again by nobody: kept in the user's cache folder."""
