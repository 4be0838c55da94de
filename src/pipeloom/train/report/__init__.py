"""Reports on a run and around it: figures, tables, profiles, rehearsals, and comparisons with one process."""
