"""The backends in PyTorch: every rounding by name, on any device."""
