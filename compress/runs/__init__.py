"""One run, from the recipe to OUT."""
