"""From the text of a recipe to its dataclasses: every mistake with its place."""
