"""What runs requests on a communicator: sessions, plans, engines; the lowest layer that needs mpi4py."""
