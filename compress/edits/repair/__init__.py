"""Closed-form repair of a model that was cut: pure functions of statistics."""
