"""The command line: parsing and printing only; every command calls one function below it."""
