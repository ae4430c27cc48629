"""The parts of ``scripts/gpu-check``: rows, results, figures, commands and processes."""
