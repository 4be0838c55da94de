"""Functions that execute actions, a file for each group of kinds; each registers its own with `@executes`."""
