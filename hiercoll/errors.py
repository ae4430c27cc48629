"""Every error that hiercoll raises on purpose.

All derive from :class:`HiercollError`, and also from the built-in class that a
caller would expect (``ValueError``, ``TypeError``, ``RuntimeError``), so that
``except ValueError`` keeps working.
"""

from __future__ import annotations

NEEDED = "CuPy and a CUDA driver (pip install 'hiercoll[cuda13]' or 'hiercoll[cuda12]')"  # for device arrays


class HiercollError(Exception):
    """Base of all errors raised by hiercoll. They can be pickled: sent to other ranks, or out of a pool's process."""

    def __reduce__(self) -> tuple[object, ...]:
        return _remade, (type(self), self.args, vars(self))


def _remade(kind: type[HiercollError], args: tuple[object, ...], attributes: dict[str, object]) -> HiercollError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ArgumentError(HiercollError, ValueError):
    """A call was given something it cannot serve; raised before any data moves.

    Attributes: ``rank`` (None outside MPI), ``argument``, ``expected``, ``got``.
    """

    def __init__(self, argument: str, expected: str, got: object, rank: int | None = None) -> None:
        self.rank = rank
        self.argument = argument
        self.expected = expected
        self.got = got
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{argument}: expected {expected}, got {got}")


class BufferSizeError(ArgumentError):
    """A buffer has the wrong number of elements or bytes."""


class BufferTypeError(ArgumentError, TypeError):
    """A buffer is of a kind, type or memory order that cannot be communicated."""


class BufferOverlapError(ArgumentError):
    """Send and receive buffers share memory."""


class DeviceError(ArgumentError):
    """A device array, or memory of a device, cannot be used; ``expected`` says what is needed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """There is not enough memory on the device, or not enough pinned memory on the host."""


class AlreadyMappedError(DeviceError):
    """Memory of another process is mapped already, or other memory that overlaps it."""


class CommunicatorError(ArgumentError):
    """The communicator is null, freed, or not an intracommunicator."""


class UnknownAlgorithmError(ArgumentError):
    """No algorithm of that name exists for the collective."""


class ParameterError(ArgumentError):
    """An algorithm's parameter is unknown or out of range."""


class ConstraintError(ArgumentError):
    """The algorithm cannot run on this topology; ``expected`` names the constraint."""


class LayoutError(ArgumentError):
    """A node layout (``HIERCOLL_NODES``, ``--layout``) is malformed or does not fit."""


class MachineError(HiercollError, ValueError):
    """The description of a machine, or measurements of one, cannot be used. Attributes: ``file``, ``field`` (or row),
    ``expected``, ``got``."""

    def __init__(self, file: object, field: str, expected: str, got: str) -> None:
        self.file, self.field, self.expected, self.got = str(file), field, expected, got
        super().__init__(f"{file}: {field}: expected {expected}, got {got}")


class TableError(HiercollError, ValueError):
    """A tuning table cannot be used. Attributes: ``file``, ``field``, ``expected``, ``got``."""

    def __init__(self, file: object, field: str, expected: str, got: str) -> None:
        self.file, self.field, self.expected, self.got = str(file), field, expected, got
        super().__init__(f"{file}: {field}: expected {expected}, got {got}")


class TableWarning(UserWarning):
    """The tuning table that the environment names cannot be used."""


class LearnedWarning(UserWarning):
    """What earlier jobs have learned cannot be read, or what this one learns cannot be kept; the program goes on."""


class NativeWarning(UserWarning):
    """A form of the MPI library's own collective delivers wrong data; it is left out of what is compared."""


class TransportWarning(UserWarning):
    """A transport that was asked for cannot be used here, and another one is; or it costs more than it need."""


class EngineWarning(UserWarning):
    """The compiled engine cannot be used here; Python's engines run instead."""


class PlanError(HiercollError, RuntimeError):
    """A plan was used in a state that does not allow it (started twice, freed)."""


class CollectiveTimeout(HiercollError, TimeoutError):  # noqa: N818
    """A call has waited for longer than its deadline; the communicator cannot be used any more."""


class CollectiveFailed(HiercollError, RuntimeError):  # noqa: N818
    """The MPI library has reported an error in the middle of a call that is watched: a rank may
    have died. The communicator cannot be used any more."""


class CollectiveMismatch(HiercollError, RuntimeError):  # noqa: N818
    """Ranks of a communicator have made different calls (``HIERCOLL_CHECK=1``)."""


class DiagnosisError(HiercollError, ValueError):
    """There are no flight records to diagnose, or they cannot be read."""


class ThreadError(HiercollError, RuntimeError):
    """A call from a thread that the MPI library's thread level does not allow."""


class ScheduleError(HiercollError, ValueError):
    """A schedule under construction breaks a rule of the model."""


class VerificationError(HiercollError):
    """A schedule was refuted; ``findings`` holds what was found."""

    def __init__(self, findings: tuple[object, ...]) -> None:
        self.findings = findings
        super().__init__("\n".join(str(finding) for finding in findings))
