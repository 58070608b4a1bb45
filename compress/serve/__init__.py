"""A checkpoint that answers: in Python, in a conversation, to lm-evaluation-harness."""
