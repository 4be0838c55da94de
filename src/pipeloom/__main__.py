"""`python -m pipeloom`: the same as the `pipeloom` command."""

from pipeloom.cli import main

if __name__ == "__main__":
    main()
