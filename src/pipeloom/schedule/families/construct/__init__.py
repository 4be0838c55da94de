"""Construction that several families share: layout of programs, list scheduling, building blocks, repeated steady states."""
