"""What a run is made of: journal, tokens, hidden states, and how tensors leave a pass."""
