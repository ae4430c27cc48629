"""The kernels: one copies scattered pieces in one launch, one combines them."""

from __future__ import annotations

from hiercoll.errors import DeviceError
from hiercoll.memory import Reduction

THREADS = 256  # of a block, at most
SPAN = 1 << 16  # bytes that a block of threads copies in one go
MOST_BLOCKS = 64, 65535  # for a piece, and for pieces

# Each row of the grid copies pieces in turn, its blocks of threads 64 KiB of one each in turn,
# in the widest words in which both ends are aligned alike.
SOURCE = r"""
typedef unsigned long long Bytes;

template <typename Word>
__device__ void copy_words(const char* __restrict__ source, char* __restrict__ target, Bytes length)
{
    const Bytes skew = reinterpret_cast<Bytes>(target) % sizeof(Word);
    const Bytes gap = skew ? sizeof(Word) - skew : 0, head = gap < length ? gap : length;
    const Bytes words = (length - head) / sizeof(Word), tail = head + words * sizeof(Word);
    const Word* __restrict__ from = reinterpret_cast<const Word*>(source + head);
    Word* __restrict__ to = reinterpret_cast<Word*>(target + head);
    #pragma unroll 4
    for (Bytes i = threadIdx.x; i < words; i += blockDim.x)
        to[i] = from[i];
    for (Bytes i = threadIdx.x; i < head; i += blockDim.x)
        target[i] = source[i];
    for (Bytes i = tail + threadIdx.x; i < length; i += blockDim.x)
        target[i] = source[i];
}

extern "C" __global__ void copy_pieces(const Bytes* table, Bytes count, Bytes span)
{
    for (Bytes piece = blockIdx.y; piece < count; piece += gridDim.y) {
        const char* source = reinterpret_cast<const char*>(table[3 * piece]);
        char* target = reinterpret_cast<char*>(table[3 * piece + 1]);
        const Bytes length = table[3 * piece + 2];
        const Bytes apart = reinterpret_cast<Bytes>(source) ^ reinterpret_cast<Bytes>(target);
        for (Bytes begin = blockIdx.x * span; begin < length; begin += gridDim.x * span) {
            const Bytes part = length - begin < span ? length - begin : span;
            if (apart % 16 == 0)
                copy_words<uint4>(source + begin, target + begin, part);
            else if (apart % 8 == 0)
                copy_words<uint2>(source + begin, target + begin, part);
            else if (apart % 4 == 0)
                copy_words<unsigned int>(source + begin, target + begin, part);
            else
                copy_words<char>(source + begin, target + begin, part);
        }
    }
}
"""

REDUCTION = r"""
typedef unsigned long long Bytes;

extern "C" __global__ void reduce_pieces(const Bytes* table, Bytes count)
{
    for (Bytes piece = blockIdx.y; piece < count; piece += gridDim.y) {
        const Element* left = reinterpret_cast<const Element*>(table[4 * piece]);
        const Element* right = reinterpret_cast<const Element*>(table[4 * piece + 1]);
        Element* target = reinterpret_cast<Element*>(table[4 * piece + 2]);  // may be one of the others
        const Bytes number = table[4 * piece + 3] / sizeof(Element), step = (Bytes)gridDim.x * blockDim.x;
        for (Bytes i = (Bytes)blockIdx.x * blockDim.x + threadIdx.x; i < number; i += step)
            target[i] = COMBINE(left[i], right[i]);
    }
}
"""
ELEMENTS = {
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}
COMBINE = {"sum": "(a) + (b)", "prod": "(a) * (b)", "min": "(b) < (a) ? (b) : (a)", "max": "(a) < (b) ? (b) : (a)"}


def reduction_source(how: Reduction) -> str:
    """The kernel for a type and an operation. Raises DeviceError for types that are none of `ELEMENTS`."""
    if how.dtype.name not in ELEMENTS or not how.dtype.isnative:
        raise DeviceError("reduction", f"elements of {', '.join(ELEMENTS)}", str(how.dtype))
    return f"#define Element {ELEMENTS[how.dtype.name]}\n#define COMBINE(a, b) ({COMBINE[how.operation]})\n{REDUCTION}"


def launch_shape(count: int, longest: int) -> tuple[tuple[int, int], tuple[int]]:
    """Grid and block for ``count`` pieces of up to ``longest`` bytes: no more threads than words."""
    blocks = min(-(-longest // SPAN), MOST_BLOCKS[0])
    threads = min(THREADS, max(32, -(-longest // 16 // 32) * 32))
    return (blocks, min(count, MOST_BLOCKS[1])), (threads,)
