"""One file of weights: its header, where every byte goes, the values, the writer."""
