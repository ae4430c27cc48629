"""What programs call: functions, drop-in communicators, MPI requests."""
