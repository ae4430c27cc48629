"""Byte layouts of blocks, what plans ask of a memory, and the memory of the host."""

from hiercoll.memory.arrays import UserBuffer, host_buffer
from hiercoll.memory.host import HostMemory, blocks_view, convert, elements
from hiercoll.memory.interface import HANDLE_BYTES, OPERATIONS, Action, Array, Combine, Memory, Now, Reduction, Transfer
from hiercoll.memory.layouts import (
    SINGLE,
    BlockLayout,
    Layout,
    UnevenLayout,
    WideLayout,
    common_chunk,
    common_pieces,
    evenly_spaced,
)

__all__ = [
    "Action",
    "Array",
    "BlockLayout",
    "HANDLE_BYTES",
    "Combine",
    "HostMemory",
    "Layout",
    "Memory",
    "Now",
    "OPERATIONS",
    "Reduction",
    "SINGLE",
    "Transfer",
    "UnevenLayout",
    "UserBuffer",
    "WideLayout",
    "blocks_view",
    "common_chunk",
    "common_pieces",
    "convert",
    "elements",
    "evenly_spaced",
    "host_buffer",
]
