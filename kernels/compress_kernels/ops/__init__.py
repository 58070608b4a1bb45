"""The operations: arguments checked, then one implementation by device."""
