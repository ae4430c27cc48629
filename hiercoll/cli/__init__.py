"""The command line, one module per family of commands."""

from hiercoll.cli import calibrate, diagnose, measure, plot, predict, prove, tune
from hiercoll.cli.common import main

__all__ = ["calibrate", "diagnose", "main", "measure", "plot", "predict", "prove", "tune"]

if __name__ == "__main__":
    main()
