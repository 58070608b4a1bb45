"""Built-in recipes, installed as the package `compress_recipes`; the YAML files are its data."""
