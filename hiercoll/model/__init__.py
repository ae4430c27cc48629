"""What schedules cost: counts, an alpha-beta model, and a simulated run; no MPI."""
