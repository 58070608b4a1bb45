"""Reports and plans as a notebook shows them."""
