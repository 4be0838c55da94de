"""Messages between the ranks of a pipeline: the transport protocol, its implementations, and the choice between them."""
