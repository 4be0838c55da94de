"""The trainer: data, optimizer, loop, metrics, `verify`, and the workers that run them."""
