"""The command line, one module per family of commands."""

from hiercoll.cli import measure, prove
from hiercoll.cli.common import main

__all__ = ["main", "measure", "prove"]

if __name__ == "__main__":
    main()
