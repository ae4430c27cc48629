"""What decides: a communicator's policy, trials in a program's own calls, and the search of ``hiercoll tune``."""
