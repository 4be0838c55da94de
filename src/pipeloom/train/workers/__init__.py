"""Worker processes: their launcher, their start and end, their network, and the reports of their failures."""
