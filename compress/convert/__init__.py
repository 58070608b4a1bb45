"""From one checkpoint format to another, tensor by tensor, without calibration."""
