"""The kernels: one copies scattered pieces in one launch, one evenly spaced rows; one combines pieces, one converts
their elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hiercoll.errors import DeviceError
from hiercoll.memory import SINGLE, Reduction

SPAN = 4096  # bytes that a warp copies in one go: pieces up to this size are one warp's, larger ones many warps'
THREADS = 256  # of a block: 8 warps
BLOCKS = 3  # for each multiprocessor of the device; the kernels have 80 registers for a thread then
ROW_BLOCKS = 6  # of the kernel for rows, which needs 40
PROCESSORS = 80  # of a device that does not tell

# What the kernels over tables have in common: which spans a warp takes.
#
# A row of the table is a piece: addresses, the last of them the target's, length, number of spans
# before it. One more row has the number of all spans. Each warp of the grid takes as many spans as
# the others, in a row: it looks for the piece of the first by halving, and goes on from there.
# Spans begin where the target is aligned to 16 bytes, but for the first of a piece.
COMMON = f"#define THREADS {THREADS}\ntypedef unsigned long long Bytes;\n"
SPANS = (
    COMMON
    + f"#define BLOCKS {BLOCKS}\n"
    + r"""
template <int COLUMNS>
struct Spans {
    const Bytes* row;
    Bytes span, next, end, begin, length;

    __device__ Spans(const Bytes* table, Bytes count, Bytes span) : span(span)
    {
        const Bytes size = blockDim.x / 32, warps = gridDim.x * size, warp = blockIdx.x * size + threadIdx.x / 32;
        const Bytes all = table[COLUMNS * count + COLUMNS - 1];
        next = all * warp / warps;
        end = all * (warp + 1) / warps;
        Bytes low = 0, high = count;
        while (low + 1 < high) {
            const Bytes middle = (low + high) / 2;
            (table[COLUMNS * middle + COLUMNS - 1] <= next ? low : high) = middle;
        }
        row = table + COLUMNS * low;
    }

    __device__ bool take()
    {
        if (next == end)
            return false;
        while (row[2 * COLUMNS - 1] <= next)
            row += COLUMNS;
        const Bytes whole = row[COLUMNS - 2], skew = row[COLUMNS - 3] % 16;
        const Bytes at = (next - row[COLUMNS - 1]) * span, stop = at + span - skew;
        begin = at ? at - skew : 0;
        length = (stop < whole ? stop : whole) - begin;
        next++;
        return true;
    }

    __device__ Bytes address(int column) const { return row[column] + begin; }
};
"""
)

# The lanes of a warp copy a span in words that are aligned in the target, the widest that are aligned
# in the source as well. Where not even words of 4 bytes are, each is put together from the two of the
# source that its bytes lie in. Single bytes are copied before the first word and after the last only.
#
# So bytes around the source are read, too: those in the same aligned word of 4 bytes as one of the
# source. That is safe: memory is mapped in pages, and no aligned word lies in two of them. Whoever
# writes these bytes meanwhile does no harm, for they are shifted out.
COPY = r"""
struct Shifted {
    const unsigned* words;
    unsigned bits;  // never 0: then there might be no byte to copy in the second word

    __device__ unsigned operator[](int i) const { return __funnelshift_r(words[i], words[i + 1], bits); }
};

template <typename Word, typename Words>
__device__ void copy_words(Words source, Word* target, int words, int lane)
{
    const int many = sizeof(Word) == 16 ? 4 : 8;  // read before the first is written: memory has much to do at once
    Word read[many];
    #pragma unroll 1
    for (int i = lane; i < words; i += 32 * many) {
        #pragma unroll
        for (int k = 0; k < many; k++)
            if (i + 32 * k < words)
                read[k] = source[i + 32 * k];
        #pragma unroll
        for (int k = 0; k < many; k++)
            if (i + 32 * k < words)
                target[i + 32 * k] = read[k];
    }
}

__device__ void copy_byte(Bytes source, Bytes target)
{
    *reinterpret_cast<char*>(target) = *reinterpret_cast<const char*>(source);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) copy_pieces(const Bytes* table, Bytes count, Bytes span)
{
    const int lane = threadIdx.x % 32;
    for (Spans<4> spans(table, count, span); spans.take();) {
        const Bytes source = spans.address(0), target = spans.address(1), apart = source ^ target;
        const int length = spans.length, size = apart % 16 == 0 ? 16 : apart % 8 == 0 ? 8 : 4;
        const int gap = (size - target % size) % size, head = gap < length ? gap : length;
        const int words = (length - head) / size, tail = head + words * size;
        if (lane < head)
            copy_byte(source + lane, target + lane);
        const Bytes from = source + head, to = target + head;
        unsigned* in_fours = reinterpret_cast<unsigned*>(to);
        if (size == 16)
            copy_words(reinterpret_cast<const uint4*>(from), reinterpret_cast<uint4*>(to), words, lane);
        else if (size == 8)
            copy_words(reinterpret_cast<const uint2*>(from), reinterpret_cast<uint2*>(to), words, lane);
        else if (apart % 4 == 0)
            copy_words(reinterpret_cast<const unsigned*>(from), in_fours, words, lane);
        else {
            const unsigned shift = from % 4;
            copy_words(Shifted{reinterpret_cast<const unsigned*>(from - shift), 8 * shift}, in_fours, words, lane);
        }
        if (tail + lane < length)
            copy_byte(source + tail + lane, target + tail + lane);
    }
}
"""
SOURCE = SPANS + COPY

# Rows that are evenly spaced need no table: where a word lies follows from its number. Neighbouring threads take
# neighbouring words, of one row or of several. There are fewer than 2^32 words: whole numbers of 32 bits divide faster.
ROWS = r"""
extern "C" __global__ void __launch_bounds__(THREADS, ROW_BLOCKS)
    copy_rows(Bytes source, Bytes source_step, Bytes target, Bytes target_step, unsigned each, unsigned words)
{
    const int many = 4;  // read before the first is written
    const Bytes threads = (Bytes)gridDim.x * blockDim.x;
    for (Bytes i = (Bytes)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += many * threads) {
        Word read[many];
        #pragma unroll
        for (int k = 0; k < many; k++) {
            const Bytes at = i + k * threads;
            const unsigned row = (unsigned)at / each;
            if (at < words)
                read[k] = reinterpret_cast<const Word*>(source + row * source_step)[(unsigned)at - row * each];
        }
        #pragma unroll
        for (int k = 0; k < many; k++) {
            const Bytes at = i + k * threads;
            const unsigned row = (unsigned)at / each;
            if (at < words)
                reinterpret_cast<Word*>(target + row * target_step)[(unsigned)at - row * each] = read[k];
        }
    }
}
"""
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}
MOST_WORDS = 2**32 - 1

# Elements are combined in vectors of 16 bytes in each span that is aligned to that in all three buffers.
REDUCTION = r"""
struct alignas(16) Vector { Element of[16 / sizeof(Element)]; };

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) reduce_pieces(const Bytes* table, Bytes count, Bytes span)
{
    const unsigned lane = threadIdx.x % 32, each = 16 / sizeof(Element);
    for (Spans<5> spans(table, count, span); spans.take();) {
        const Element* left = reinterpret_cast<const Element*>(spans.address(0));
        const Element* right = reinterpret_cast<const Element*>(spans.address(1));
        Element* target = reinterpret_cast<Element*>(spans.address(2));  // may be one of the others
        const bool aligned = (spans.address(0) | spans.address(1) | spans.address(2)) % 16 == 0;
        const Bytes number = spans.length / sizeof(Element), vectors = aligned ? number / each : 0;
        for (Bytes i = lane; i < vectors; i += 32) {
            Vector a = reinterpret_cast<const Vector*>(left)[i];
            const Vector b = reinterpret_cast<const Vector*>(right)[i];
            #pragma unroll
            for (unsigned k = 0; k < each; k++)
                a.of[k] = COMBINE(a.of[k], b.of[k]);
            reinterpret_cast<Vector*>(target)[i] = a;
        }
        for (Bytes i = vectors * each + lane; i < number; i += 32)
            target[i] = COMBINE(left[i], right[i]);
    }
}
"""
# Numbers of half precision, as words of 2 bytes, to and from single precision, as words of 4: the same bits as on the
# host (runtime/_engine.c: from_half, to_half, to_bfloat), where NumPy's and ml_dtypes' conversions are the model.
WIDTHS = r"""
__device__ unsigned from_half(unsigned short half)
{
    const unsigned sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) // infinite, or NaN
        return sign | (rest + 0x70000000u);
    if (rest >= 0x00800000u)
        return sign | (rest + 0x38000000u);
    return sign | __float_as_uint(__uint_as_float(rest + 0x38800000u) - __uint_as_float(0x38800000u));
}

__device__ unsigned short to_half(unsigned single) // to the nearest, to the even one of two
{
    const unsigned sign = single >> 16 & 0x8000u, rest = single & 0x7fffffffu;
    if (rest > 0x7f800000u) { // NaN
        const unsigned payload = rest >> 13 & 0x3ffu;
        return sign | 0x7c00u | (payload ? payload : 1u);
    }
    if (rest >= 0x47800000u) // infinite, or too large
        return sign | 0x7c00u;
    if (rest < 0x38800000u) // the sum has as many digits behind the point as there are
        return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u);
    return sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

__device__ unsigned from_bfloat(unsigned short bfloat)
{
    return (unsigned)bfloat << 16;
}

__device__ unsigned short to_bfloat(unsigned single)
{
    if ((single & 0x7fffffffu) > 0x7f800000u)
        return (single >> 16 & 0x8000u) | 0x7fc0u;
    return (single + 0x7fffu + (single >> 16 & 1u)) >> 16;
}
"""

# As many elements at a time as are 16 bytes in single precision, in each span that is aligned to that at both ends.
CONVERSION = r"""
struct alignas(4 * sizeof(Source)) Sources { Source of[4]; };
struct alignas(4 * sizeof(Target)) Targets { Target of[4]; };

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convert_pieces(const Bytes* table, Bytes count, Bytes span)
{
    const unsigned lane = threadIdx.x % 32;
    for (Spans<4> spans(table, count, span); spans.take();) {
        const Bytes from = spans.row[0] + spans.begin / sizeof(Target) * sizeof(Source), to = spans.address(1);
        const Source* source = reinterpret_cast<const Source*>(from);
        Target* target = reinterpret_cast<Target*>(to);
        const bool aligned = from % sizeof(Sources) == 0 && to % sizeof(Targets) == 0;
        const Bytes number = spans.length / sizeof(Target), vectors = aligned ? number / 4 : 0;
        for (Bytes i = lane; i < vectors; i += 32) {
            const Sources read = reinterpret_cast<const Sources*>(source)[i];
            Targets made;
            #pragma unroll
            for (unsigned k = 0; k < 4; k++)
                made.of[k] = CONVERT(read.of[k]);
            reinterpret_cast<Targets*>(target)[i] = made;
        }
        for (Bytes i = vectors * 4 + lane; i < number; i += 32)
            target[i] = CONVERT(source[i]);
    }
}
"""
CONVERSIONS = {"float16": "half", "bfloat16": "bfloat"}
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


def row_source(word: int) -> str:
    """The kernel that copies rows in words of so many bytes, one of `WORDS`."""
    return f"#define Word {WORDS[word]}\n#define ROW_BLOCKS {ROW_BLOCKS}\n" + COMMON + ROWS


def can_combine(how: Reduction) -> bool:
    """Whether there is a kernel for it."""
    return how.dtype.name in ELEMENTS and how.dtype.isnative and how.operation in COMBINE


def reduction_source(how: Reduction) -> str:
    """The kernel for a type and an operation. Raises DeviceError for types that are none of `ELEMENTS`."""
    if not can_combine(how):
        raise DeviceError("reduction", f"elements of {', '.join(ELEMENTS)}", str(how.dtype))
    given = f"#define Element {ELEMENTS[how.dtype.name]}\n#define COMBINE(a, b) ({COMBINE[how.operation]})\n"
    return given + SPANS + REDUCTION


def conversion_source(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """The kernel that converts between single precision and a type of `CONVERSIONS`. Raises DeviceError for others."""
    widens = target == SINGLE
    narrow, wide = (source, target) if widens else (target, source)
    if narrow.name not in CONVERSIONS or wide != SINGLE:
        raise DeviceError("conversion", f"{' or '.join(CONVERSIONS)}, and float32", f"{source} to {target}")
    words = ("unsigned short", "unsigned int")
    given = "#define Source {}\n#define Target {}\n".format(*(words if widens else reversed(words)))
    convert = f"#define CONVERT {'from' if widens else 'to'}_{CONVERSIONS[narrow.name]}\n"
    return given + convert + SPANS + WIDTHS + CONVERSION


def span_table(pieces: Sequence[tuple[int, ...]], span: int = SPAN) -> npt.NDArray[np.uint64]:
    """A kernel's table of pieces, of which each is given by addresses, the target's last, and its length."""
    given = np.array(pieces, dtype=np.uint64)
    number, columns = given.shape
    table = np.zeros((number + 1, columns + 1), dtype=np.uint64)
    table[:-1, :-1] = given
    target, length = given[:, -2], given[:, -1]
    np.cumsum((target % 16 + length + (span - 1)) // span, out=table[1:, -1])
    return table


def launch_shape(spans: int, processors: int = PROCESSORS) -> tuple[tuple[int], tuple[int]]:
    """Grid and block for so many spans: what fits on the device at once, or a block for each span if that is less."""
    return (max(1, min(spans, BLOCKS * processors)),), (THREADS,)


def row_launch_shape(words: int, processors: int = PROCESSORS) -> tuple[tuple[int], tuple[int]]:
    """The same for rows of so many words in all, of which each thread takes four at once."""
    return (max(1, min(-(-words // (4 * THREADS)), ROW_BLOCKS * processors)),), (THREADS,)
