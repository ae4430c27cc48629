"""No test learns from an earlier job, nor teaches a later one: nobody can write where they keep what they learn."""

import os

os.environ.setdefault("HIERCOLL_LEARNED", "/proc/learned")
