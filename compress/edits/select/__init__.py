"""What of a linear stays when it is cut: pure functions of statistics, one paper a file."""
