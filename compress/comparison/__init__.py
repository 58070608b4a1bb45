"""Several recipes on one model, or several finished results, held against each other."""
