"""Messages between the ranks of a pipeline: the transport protocol, its implementations, and which one a run uses."""
