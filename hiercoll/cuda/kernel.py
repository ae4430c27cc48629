"""The kernel that copies scattered pieces in one launch."""

from __future__ import annotations

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


def launch_shape(count: int, longest: int) -> tuple[tuple[int, int], tuple[int]]:
    """Grid and block for ``count`` pieces of up to ``longest`` bytes: no more threads than words."""
    blocks = min(-(-longest // SPAN), MOST_BLOCKS[0])
    threads = min(THREADS, max(32, -(-longest // 16 // 32) * 32))
    return (blocks, min(count, MOST_BLOCKS[1])), (threads,)
