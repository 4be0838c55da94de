"""Measurements of a configuration's model on this device: times and bytes of layers, times of links, and rehearsals."""
