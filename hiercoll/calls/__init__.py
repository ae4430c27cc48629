"""What programs call: functions, drop-in communicators, MPI requests."""

OLDEST = 4  # major version of mpi4py


def _version_of_mpi4py() -> str:
    """Without beginning MPI; "" where there is none."""
    try:
        import mpi4py
    except ModuleNotFoundError:
        return ""
    return mpi4py.__version__


if not (_found := _version_of_mpi4py()) or int(_found.partition(".")[0]) < OLDEST:
    raise ImportError(
        f"hiercoll needs mpi4py {OLDEST}.0 or newer, and finds {_found or 'none'}: pip install 'mpi4py>={OLDEST}.0'",
        name="mpi4py",
    )
