"""The passes that quantize: tensor by tensor, or block by block with calibration."""
