"""The command line, one module per family of commands."""

from hiercoll.cli import measure, plot, prove
from hiercoll.cli.common import main

__all__ = ["main", "measure", "plot", "prove"]

if __name__ == "__main__":
    main()
