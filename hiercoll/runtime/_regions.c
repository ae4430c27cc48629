/* Packing and unpacking blocks of MPI's datatypes: bytes that lie apart, by words that `hiercoll.memory.regions` makes.
 *
 * Words, block by block: where it begins, how often its pieces come, bytes from one time to the next, number of pieces;
 * of each piece: offset, length of its runs, number of loops; of each loop, outermost first: count, stride in bytes. */

#include "_engine.h"
#include <string.h>

enum { UNLOCKED = 1 << 16 }; /* bytes from which on other threads may run meanwhile */

typedef struct {
    const int64_t *words, *end;
    char *apart, *packed;
    int outward;
} Copying;

/* Runs of a length that the compiler knows, so that each is moved by a few instructions. Four are read before the first
 * is written: the compiler cannot know that they lie apart. */
#define RUNS(length)                                                                                                 \
    {                                                                                                                \
        struct { char bytes[length]; } a, b, c, d;                                                                   \
        for (; count >= 4; count -= 4, to += 4 * to_step, from += 4 * from_step) {                                   \
            memcpy(&a, from, length), memcpy(&b, from + from_step, length);                                          \
            memcpy(&c, from + 2 * from_step, length), memcpy(&d, from + 3 * from_step, length);                      \
            memcpy(to, &a, length), memcpy(to + to_step, &b, length);                                                \
            memcpy(to + 2 * to_step, &c, length), memcpy(to + 3 * to_step, &d, length);                              \
        }                                                                                                            \
        for (; count; count--, to += to_step, from += from_step)                                                     \
            memcpy(to, from, length);                                                                                \
        return;                                                                                                      \
    }

enum { PART = 1024 }; /* bytes of a run that are copied at once: of more, memcpy may take instructions that are slow
                       * where both ends lie alike within a page, as those of large arrays mostly do */

/* The C library's, whatever the compiler knows of lengths: for some it has slower instructions of its own. */
static void *(*volatile library_memcpy)(void *, const void *, size_t) = memcpy;

static void copy_runs(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t count, int64_t length)
{
    switch (length) {
    case 1: RUNS(1);
    case 2: RUNS(2);
    case 4: RUNS(4);
    case 8: RUNS(8);
    case 12: RUNS(12);
    case 16: RUNS(16);
    case 24: RUNS(24);
    case 32: RUNS(32);
    case 48: RUNS(48);
    case 64: RUNS(64);
    }
    void *(*copy)(void *, const void *, size_t) = library_memcpy;
    for (; count; count--, to += to_step, from += from_step) {
        int64_t done = 0;
        for (; length - done > PART; done += PART)
            copy(to + done, from + done, PART);
        copy(to + done, from + done, (size_t)(length - done));
    }
}

/* The runs of a piece that its loops from ``loops`` to ``end`` make, of which the first begins at ``apart``. */
static void copy_piece(Copying *c, char *apart, int64_t length, const int64_t *loops, const int64_t *end)
{
    if (end - loops > 2) {
        for (int64_t i = 0; i < loops[0]; i++)
            copy_piece(c, apart + i * loops[1], length, loops + 2, end);
        return;
    }
    int64_t count = loops == end ? 1 : loops[0], stride = loops == end ? 0 : loops[1];
    if (c->outward)
        copy_runs(c->packed, length, apart, stride, count, length);
    else
        copy_runs(apart, stride, c->packed, length, count, length);
    c->packed += count * length;
}

static void copy_blocks(Copying *c)
{
    for (const int64_t *at = c->words; at < c->end;) {
        const int64_t *pieces = at + 4, *next = pieces;
        for (int64_t time = 0; time < at[1]; time++) {
            char *begin = c->apart + at[0] + time * at[2];
            next = pieces;
            for (int64_t piece = 0; piece < at[3]; piece++, next += 3 + 2 * next[2])
                copy_piece(c, begin + next[0], next[1], next + 3, next + 3 + 2 * next[2]);
        }
        at = next;
    }
}

/* Blocks to where they lie together, or (not ``outward``) back. */
void move_blocks(const Move *move, int outward)
{
    Copying c = {move->words, move->end, move->apart, move->packed, outward};
    if (move->nbytes < UNLOCKED) {
        copy_blocks(&c);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        copy_blocks(&c);
        Py_END_ALLOW_THREADS;
    }
}

static PyObject *engine_copy_blocks(PyObject *module, PyObject *args)
{
    Py_buffer words;
    unsigned long long apart, packed;
    Py_ssize_t nbytes;
    int outward;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*KKnp", &words, &apart, &packed, &nbytes, &outward))
        return NULL;
    const int64_t *first = words.buf;
    Move move = {first, first + words.len / (Py_ssize_t)sizeof *first, (char *)(uintptr_t)apart,
                 (char *)(uintptr_t)packed, nbytes};
    move_blocks(&move, outward);
    PyBuffer_Release(&words);
    return Py_BuildValue("");
}

static PyMethodDef functions[] = {
    {"copy_blocks", engine_copy_blocks, METH_VARARGS,
     "copy_blocks(words, address, packed, nbytes, outward): copy blocks about an address to the bytes at another one, or back."},
    {NULL, NULL, 0, NULL}};

int add_regions(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
