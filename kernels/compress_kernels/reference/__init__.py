"""The specification: plain torch, any device, as close to the papers as code can be."""
