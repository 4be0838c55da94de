"""A model and a mesh in numbers: sizes, `config.json`, operations per layer, cuts into stages. Needs no torch."""
