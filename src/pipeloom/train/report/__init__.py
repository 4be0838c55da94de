"""What is reported about a run: figures, tables, profiles, and comparisons with one process."""
