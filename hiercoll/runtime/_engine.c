/* The compiled engine: runs the steps of one rank.
 *
 * It includes no header of an MPI library: it is given the addresses of the few functions that it calls, and the width
 * of a handle (4 bytes with MPICH and its kin, 8 with Open MPI and the ABI of MPI 5), so that one build serves every MPI
 * library. Messages are begun anew at each start, relative to bases that each start may have others of: what has been
 * compiled for one pair of buffers runs on every other one.
 *
 * A program is an array of 64-bit words, made by programs.py; see `enum kind`. They are done one after the other; or,
 * where there is a flow of steps, a step's words are done as soon as all steps that it needs are complete. */

#include "_engine.h"
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum {
    LOOKS = 8,          /* at what is waited for, before others are let run */
    PROGRESS_EVERY = 8, /* looks at flags, between calls that let the MPI library go on */
    CLOCK_EVERY = 64    /* looks between those at the clock */
};
static const struct timespec SLEEP = {0, 1000000}; /* at most, between calls that let the MPI library go on */
static const double CLOCK_SECONDS = 0.05; /* between looks for Ctrl-C, and at the deadline */

/* Words after the kind and the number of words of each step. */
enum kind {
    SEND, /* peer, tag, slot of the request, base, offset, count, datatype */
    RECEIVE,
    WAIT,       /* slots of requests .. */
    COPY,       /* base, offset, base, offset of the target, bytes, pieces, distance of pieces, and in the target */
    RAISE,      /* index of a flag */
    FLAGS,      /* starts back, indices of flags .. */
    DONE,       /* step of a flow that is complete with the one that begins it: its message has no bytes */
    SEND_BLOCKS, /* peer, tag, slot, base, table, blocks ..: where and as long as the table says in this start */
    RECEIVE_BLOCKS,
    COPY_BLOCKS, /* base, table, base and table of the target, blocks .., blocks of the target .. */
    PLACE,       /* table, base, offset, entry in the base, block, entry, block ..: blocks whose sizes the entries hold
                  * come to lie one after the other from the offset on */
    REDUCE,      /* operation, datatype, bytes of an element, whether operands may change places, bytes; base and offset
                  * of left, right and target */
    CONVERT      /* kind (enum conversion), base, offset, base, offset of the target, elements */
};
enum conversion { FROM_HALF, TO_HALF, FROM_BFLOAT, TO_BFLOAT }; /* to and from single precision */
enum { CHUNK = 32768 }; /* bytes that are copied and combined at a time: so many stay in the caches */

/* ---- The MPI library */

static struct {
    void *isend, *irecv, *testall, *testsome, *test, *iprobe, *hindexed, *commit, *free_type, *reduce_local;
    int width, any_tag;   /* bytes of a handle; MPI_ANY_TAG */
    long long null, byte; /* MPI_REQUEST_NULL, MPI_BYTE */
    Py_ssize_t status;    /* bytes */
    PyObject *exception;  /* MPI.Exception */
    void *library;        /* mpi4py's module, which has loaded the MPI library */
} mpi;
void *mpi_create_keyval, *mpi_get_attribute, *mpi_set_attribute, *mpi_rank, *mpi_size, *mpi_test_inter, *mpi_group,
    *mpi_translate_ranks, *mpi_free_group;

int64_t get_handle(const char *at)
{
    int32_t narrow;
    int64_t wide;
    memcpy(mpi.width == 4 ? (void *)&narrow : (void *)&wide, at, (size_t)mpi.width);
    return mpi.width == 4 ? narrow : wide;
}

int64_t handle_of(intptr_t argument) { return mpi.width == 4 ? (int32_t)argument : argument; }

static char *slot(const Program *self, int64_t index) { return self->slots + index * mpi.width; }

static void set_null(Program *self, int64_t index)
{
    int32_t narrow = (int32_t)mpi.null;
    memcpy(slot(self, index), mpi.width == 4 ? (void *)&narrow : (void *)&mpi.null, (size_t)mpi.width);
}

typedef int (*message_int)(void *, int, int, int, int, int, void *);
typedef int (*message_pointer)(void *, int, void *, int, int, void *, void *);
typedef int (*testall_any)(int, void *, int *, void *);
typedef int (*testsome_any)(int, void *, int *, int *, void *);
typedef int (*test_any)(void *, int *, void *);
typedef int (*iprobe_int)(int, int, int, int *, void *);
typedef int (*iprobe_pointer)(int, int, void *, int *, void *);
typedef int (*hindexed_int)(int, const int *, const int64_t *, int, void *);
typedef int (*hindexed_pointer)(int, const int *, const int64_t *, void *, void *);
typedef int (*type_any)(void *);
typedef int (*reduce_int)(const void *, void *, int, int, int);
typedef int (*reduce_pointer)(const void *, void *, int, void *, void *);

int failed(int code)
{
    PyObject *error = PyObject_CallFunction(mpi.exception, "i", code);
    if (error)
        PyErr_SetObject(mpi.exception, error);
    Py_XDECREF(error);
    return -1;
}

/* ``words``: peer, tag, slot. */
static int begin_message(Program *self, int sends, const int64_t *words, int64_t at, int64_t count, int64_t type)
{
    void *function = sends ? mpi.isend : mpi.irecv, *data = (void *)(uintptr_t)at, *request = slot(self, words[2]);
    int peer = (int)words[0], tag = self->tag + (int)words[1], code;
    if (mpi.width == 4)
        code = ((message_int)function)(data, (int)count, (int)type, peer, tag, (int)self->comm, request);
    else
        code = ((message_pointer)function)(data, (int)count, (void *)type, peer, tag, (void *)self->comm, request);
    return code ? failed(code) : 1;
}

/* The same of pieces that lie apart, as one message. */
static int begin_pieces(Program *self, int sends, const int64_t *words, int64_t at, int count)
{
    char type[sizeof(int64_t)];
    int code, outcome = 1;
    if (mpi.width == 4)
        code = ((hindexed_int)mpi.hindexed)(count, self->lengths, self->beginnings, (int)mpi.byte, type);
    else
        code = ((hindexed_pointer)mpi.hindexed)(count, self->lengths, self->beginnings, (void *)mpi.byte, type);
    code = code ? code : ((type_any)mpi.commit)(type);
    if (!code && (outcome = begin_message(self, sends, words, at, 1, get_handle(type))) > 0)
        code = ((type_any)mpi.free_type)(type); /* MPI does, once the message is complete */
    return code ? failed(code) : outcome;
}

/* ---- Waiting. Looks return 1 for complete, 0 for not yet, or less: the error code of the MPI library, negated. */

static int look_at_requests(Program *self, Py_ssize_t count, unsigned look)
{
    (void)look;
    int done = 0, code = ((testall_any)mpi.testall)((int)count, self->gathered, &done, self->statuses);
    return code ? -code : done;
}

static int look_at_flags(Program *self, Py_ssize_t count, unsigned look)
{
    const int64_t *words = self->code + self->at;
    int64_t goal = *self->window - words[2];
    while (self->seen < count && __atomic_load_n(self->flags + words[3 + self->seen], __ATOMIC_ACQUIRE) >= goal)
        self->seen++;
    if (self->seen == count || look % PROGRESS_EVERY < PROGRESS_EVERY - 1)
        return self->seen == count;
    /* What others wait for may still be in the library's queues: a large message needs its receiver. */
    int found;
    if (mpi.width == 4)
        return -((iprobe_int)mpi.iprobe)(self->rank, mpi.any_tag, (int)self->comm, &found, self->statuses);
    return -((iprobe_pointer)mpi.iprobe)(self->rank, mpi.any_tag, (void *)self->comm, &found, self->statuses);
}

static void complete_step(Program *self, int64_t index)
{
    self->left--;
    for (int64_t each = self->steps[index].first; each < self->steps[index].last; each++) {
        int64_t dependent = self->dependents[each];
        int begins = self->steps[dependent].begins != 0;
        if (--self->waiting[dependent] == 0)
            self->ready[begins][self->ready_count[begins]++] = dependent;
    }
}

static int look_at_any_request(Program *self, Py_ssize_t count, unsigned look)
{
    (void)look;
    int done = 0;
    int code = ((testsome_any)mpi.testsome)((int)count, self->slots, &done, self->found, self->statuses);
    for (int each = 0; each < done; each++)
        complete_step(self, self->completes[self->found[each]]);
    return code ? -code : done > 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Flags, and ranks that sleep until one is raised: there a waiting rank lets others have its core. */

#ifdef SYS_futex
/* The half of a flag in which its number changes. */
static int32_t *futex_of(const Program *self, int64_t flag)
{
    const int one = 1;
    return (int32_t *)(self->flags + flag) + !*(const char *)&one;
}

/* Until the flag is raised that is waited for; for a while at most, since the library's messages may need this rank: 1
 * after so long. */
static int sleep_for_flag(const Program *self)
{
    const int64_t *words = self->code + self->at, flag = words[3 + self->seen];
    int late = 0;
    __atomic_fetch_add(self->sleepers, 1, __ATOMIC_SEQ_CST);
    int64_t number = __atomic_load_n(self->flags + flag, __ATOMIC_SEQ_CST);
    if (number < *self->window - words[2])
        late = syscall(SYS_futex, futex_of(self, flag), FUTEX_WAIT, (int32_t)number, &SLEEP, NULL, 0) < 0 &&
               errno == ETIMEDOUT;
    __atomic_fetch_sub(self->sleepers, 1, __ATOMIC_SEQ_CST);
    return late;
}

static void wake(const Program *self, int64_t flag)
{
    if (__atomic_load_n(self->sleepers, __ATOMIC_SEQ_CST) > 0)
        syscall(SYS_futex, futex_of(self, flag), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
#else
static int sleep_for_flag(const Program *self) { return (void)self, sched_yield(), 1; }
static void wake(const Program *self, int64_t flag) { (void)self, (void)flag; }
#endif

static void raise_flag(const Program *self, int64_t flag)
{
    if (!self->sleepers) {
        __atomic_store_n(self->flags + flag, *self->window, __ATOMIC_RELEASE);
        return;
    }
    __atomic_store_n(self->flags + flag, *self->window, __ATOMIC_SEQ_CST);
    wake(self, flag);
}

static int has_messages(const Program *self)
{
    for (int index = 0; index < self->requests; index++)
        if (get_handle(slot(self, index)) != get_handle((const char *)&mpi.null))
            return 1;
    return 0;
}

/* What takes longer, without the GIL: 1 when complete, -1 with an exception: of MPI, of the deadline, or by Ctrl-C. */
static int await_long(Program *self, int (*complete)(Program *, Py_ssize_t, unsigned), Py_ssize_t count, unsigned look)
{
    double looked = 0, time;
    int found = 0, late = 0, interrupted = 0;
    int sleeps = complete == look_at_flags && self->sleepers && !has_messages(self);
    PyThreadState *thread = PyEval_SaveThread();
    for (; !found && !late && !interrupted; look++) {
        if (sleeps)
            look = sleep_for_flag(self) ? PROGRESS_EVERY - 1 : 0;
        else
            sched_yield();
        found = complete(self, count, look);
        if (found || (!sleeps && look % CLOCK_EVERY) || (time = now()) - looked < CLOCK_SECONDS)
            continue;
        looked = time;
        self->began = self->began ? self->began : time;
        late = self->limit > 0 && time - self->began > self->limit;
        PyEval_RestoreThread(thread);
        interrupted = PyErr_CheckSignals() < 0;
        thread = PyEval_SaveThread();
    }
    PyEval_RestoreThread(thread);
    if (late && !interrupted)
        PyErr_SetNone(PyExc_TimeoutError);
    return found > 0 ? 1 : found < 0 ? failed(-found) : -1;
}

/* 1 when complete; 0 if not, and not to ``block``; -1 with an exception. */
static int await(Program *self, int (*complete)(Program *, Py_ssize_t, unsigned), Py_ssize_t count, int block)
{
    int found = 0;
    unsigned look = 0;
    while (!found && look < LOOKS) /* the last one lets the library go on */
        found = complete(self, count, look++);
    if (!found && block)
        return await_long(self, complete, count, look);
    return found < 0 ? failed(-found) : found;
}

static int wait_for_messages(Program *self, const int64_t *words, int block)
{
    Py_ssize_t count = words[1] - 2;
    for (Py_ssize_t each = 0; each < count && !self->awaited; each++)
        memcpy(self->gathered + each * mpi.width, slot(self, words[2 + each]), (size_t)mpi.width);
    self->awaited = 1;
    int done = await(self, look_at_requests, count, block);
    for (Py_ssize_t each = 0; each < count && done > 0; each++)
        set_null(self, words[2 + each]);
    self->awaited = done <= 0;
    return done;
}

/* ---- Doing */

static void copy(const Program *self, const int64_t *words)
{
    const char *source = (const char *)(uintptr_t)(self->bases[words[2]] + words[3]);
    char *target = (char *)(uintptr_t)(self->bases[words[4]] + words[5]);
    for (int64_t piece = 0; piece < words[7]; piece++, source += words[8], target += words[9])
        memmove(target, source, (size_t)words[6]);
}

static uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static float number_of(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint32_t from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x0f800000) /* infinite, or NaN */
        return sign | (rest + 0x70000000);
    if (rest >= 0x00800000)
        return sign | (rest + 0x38000000);
    return sign | bits_of(number_of(rest + 0x38800000) - number_of(0x38800000)); /* below 2 to the -14 */
}

/* To the nearest, to the even one of two, as NumPy does. */
static uint16_t to_half(uint32_t single)
{
    uint32_t sign = single >> 16 & 0x8000, rest = single & 0x7fffffff;
    if (rest > 0x7f800000) { /* NaN */
        uint32_t payload = rest >> 13 & 0x3ff;
        return (uint16_t)(sign | 0x7c00 | (payload ? payload : 1));
    }
    if (rest >= 0x47800000) /* infinite, or too large */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* the sum has as many digits behind the point as there are */
        return (uint16_t)(sign | (bits_of(number_of(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

/* As ml_dtypes does. */
static uint16_t to_bfloat(uint32_t single)
{
    if ((single & 0x7fffffff) > 0x7f800000)
        return (uint16_t)((single >> 16 & 0x8000) | 0x7fc0);
    return (uint16_t)((single + 0x7fff + (single >> 16 & 1)) >> 16);
}

static void convert(const Program *self, const int64_t *words)
{
    const char *source = (const char *)(uintptr_t)(self->bases[words[3]] + words[4]);
    char *target = (char *)(uintptr_t)(self->bases[words[5]] + words[6]);
    uint32_t wide;
    uint16_t narrow;
#define EACH(from, to, conversion)                                                                                     \
    for (int64_t each = 0; each < words[7]; each++) { /* wherever they lie */                                          \
        memcpy(&from, source + each * (int64_t)sizeof from, sizeof from);                                              \
        to = conversion;                                                                                               \
        memcpy(target + each * (int64_t)sizeof to, &to, sizeof to);                                                    \
    }
    switch ((enum conversion)words[2]) {
    case FROM_HALF:
        EACH(narrow, wide, from_half(narrow))
        break;
    case TO_HALF:
        EACH(wide, narrow, to_half(wide))
        break;
    case FROM_BFLOAT:
        EACH(narrow, wide, (uint32_t)narrow << 16)
        break;
    case TO_BFLOAT:
        EACH(wide, narrow, to_bfloat(wide))
        break;
    }
#undef EACH
}

static int64_t size_in(const Table *table, int64_t block)
{
    int64_t size = table->sizes[block];
    return size >= table->least && size < table->below ? size : 0;
}

/* The blocks of a message: those that lie together are a piece of it. */
static int begin_blocks(Program *self, const int64_t *words)
{
    const Table *table = &self->tables[words[6]];
    int count = 0, sends = words[0] == SEND_BLOCKS;
    for (const int64_t *block = words + 7; block < words + words[1]; block++) {
        int64_t size = size_in(table, *block), place = table->places[*block], last = count - 1;
        if (size && count && self->beginnings[last] + self->lengths[last] == place && self->lengths[last] + size <= INT_MAX)
            self->lengths[last] += (int)size;
        else if (size) {
            self->lengths[count] = (int)size;
            self->beginnings[count++] = place;
        }
    }
    int64_t base = self->bases[words[5]];
    if (count == 1)
        return begin_message(self, sends, words + 2, base + self->beginnings[0], self->lengths[0], mpi.byte);
    if (count)
        return begin_pieces(self, sends, words + 2, base, count);
    if (self->steps) /* no message, as the other end knows, too */
        complete_step(self, self->completes[words[4]]);
    return 1;
}

static void copy_blocks(const Program *self, const int64_t *words)
{
    const Table *from = &self->tables[words[3]], *to = &self->tables[words[5]];
    int64_t count = (words[1] - 6) / 2;
    for (const int64_t *block = words + 6; block < words + 6 + count; block++) {
        int64_t size = size_in(from, *block), room = size_in(to, block[count]); /* equal, if ranks agree on it */
        memmove((void *)(uintptr_t)(self->bases[words[4]] + to->places[block[count]]),
                (void *)(uintptr_t)(self->bases[words[2]] + from->places[*block]), (size_t)(size < room ? size : room));
    }
}

static void place_blocks(const Program *self, const int64_t *words)
{
    const Table *table = &self->tables[words[2]];
    const int64_t *entries = (const int64_t *)(uintptr_t)self->bases[words[3]];
    int64_t next = words[4];
    for (const int64_t *each = words + 5; each < words + words[1]; each += 2) {
        table->sizes[each[1]] = entries[each[0]];
        table->places[each[1]] = next;
        next += size_in(table, each[1]);
    }
}

static int combine(const int64_t *words, const void *left, void *target, int64_t bytes)
{
    int count = (int)(bytes / words[4]), code;
    if (mpi.width == 4)
        code = ((reduce_int)mpi.reduce_local)(left, target, count, (int)words[3], (int)words[2]);
    else
        code = ((reduce_pointer)mpi.reduce_local)(left, target, count, (void *)words[3], (void *)words[2]);
    return code ? failed(code) : 1;
}

/* target = left (+) right: the MPI library puts it into the right operand. */
static int reduce(const Program *self, const int64_t *words)
{
    int64_t bytes = words[6], most = CHUNK;
    char *ends[3], *kept = NULL; /* left, right, target */
    int done = 1;
    for (int end = 0; end < 3; end++)
        ends[end] = (char *)(uintptr_t)(self->bases[words[7 + 2 * end]] + words[8 + 2 * end]);
    if (ends[2] == ends[0] && words[5]) {
        ends[0] = ends[1];
        ends[1] = ends[2];
    }
    if (ends[1] == ends[2])
        most = INT_MAX; /* as the MPI library counts elements */
    int64_t step = most > words[4] ? most / words[4] * words[4] : words[4];
    if (ends[2] == ends[0] && !(kept = malloc((size_t)step)))
        return PyErr_NoMemory(), -1;
    for (int64_t at = 0; at < bytes && done > 0; at += step) {
        int64_t length = bytes - at < step ? bytes - at : step;
        if (kept)
            memcpy(kept, ends[0] + at, (size_t)length);
        if (ends[1] != ends[2])
            memcpy(ends[2] + at, ends[1] + at, (size_t)length);
        done = combine(words, kept ? kept : ends[0] + at, ends[2] + at, length);
    }
    free(kept);
    return done;
}

/* Do the words of a step: 1 when that is done, 0 if not, -1 with an exception. */
static int do_words(Program *self, const int64_t *words, int block)
{
    int done;
    switch ((enum kind)words[0]) {
    case SEND:
    case RECEIVE:
        return begin_message(self, words[0] == SEND, words + 2, self->bases[words[5]] + words[6], words[7], words[8]);
    case WAIT:
        return wait_for_messages(self, words, block);
    case COPY:
        copy(self, words);
        return 1;
    case RAISE:
        raise_flag(self, words[2]);
        return 1;
    case FLAGS:
        done = await(self, look_at_flags, words[1] - 3, block);
        self->seen = done > 0 ? 0 : self->seen;
        return done;
    case DONE:
        complete_step(self, words[2]);
        return 1;
    case SEND_BLOCKS:
    case RECEIVE_BLOCKS:
        return begin_blocks(self, words);
    case COPY_BLOCKS:
        copy_blocks(self, words);
        return 1;
    case PLACE:
        place_blocks(self, words);
        return 1;
    case REDUCE:
        return reduce(self, words);
    case CONVERT:
        convert(self, words);
        return 1;
    }
    return 1;
}

/* Launch all steps of a flow that are ready, and what becomes ready by that; messages first, so that they travel while
 * this rank copies. */
static int launch(Program *self)
{
    while (self->ready_count[0] || self->ready_count[1]) {
        int begins = self->ready_count[1] > 0;
        int64_t index = self->ready[begins][--self->ready_count[begins]];
        for (int64_t at = self->steps[index].from; at < self->steps[index].to; at += self->code[at + 1])
            if (do_words(self, self->code + at, 0) < 0)
                return -1;
        if (!begins)
            complete_step(self, index);
    }
    return 1;
}

int advance_program(Program *self, int block)
{
    int done = 1;
    while (self->steps && (done = launch(self)) > 0 && self->left)
        if ((done = await(self, look_at_any_request, self->requests, block)) <= 0)
            break;
    while (!self->steps && self->at < self->length && (done = do_words(self, self->code + self->at, block)) > 0)
        self->at += self->code[self->at + 1];
    self->active = done <= 0;
    return done;
}

int begin_program(Program *self)
{
    if (self->active || self->is_freed) {
        PyErr_SetString(PyExc_RuntimeError, self->active ? "a program is active" : "a program has been freed");
        return -1;
    }
    self->active = 1;
    self->at = self->seen = self->awaited = 0;
    self->began = 0;
    if (self->window)
        ++*self->window;
    self->left = self->ready_count[0] = self->ready_count[1] = 0;
    for (int64_t index = 0; self->steps && index < self->number; index++) {
        int begins = self->steps[index].begins != 0;
        self->left += !begins;
        self->waiting[index] = self->steps[index].needs;
        if (!self->waiting[index])
            self->ready[begins][self->ready_count[begins]++] = index;
    }
    return 0;
}

/* ---- Programs in Python */

/* The tables of blocks: each begins where the one before ends, or is ``like`` an earlier one. Sizes of those ``in_row``
 * are the row of this rank's lane among those of a node, which are the base of sizes. Returns the words taken. */
typedef struct {
    int64_t like, count, least, below, in_row;
} TableOf;

static Py_ssize_t place_tables(Program *self, int64_t *memory, const TableOf *tables, Py_ssize_t count, int lane, int lanes)
{
    int64_t row = 0;
    for (Py_ssize_t index = 0; index < count; index++)
        row += tables[index].in_row * tables[index].count;
    int64_t *next = memory + row * lanes, *own = memory + row * lane;
    for (Py_ssize_t index = 0; index < count; index++) {
        const TableOf *given = &tables[index];
        Table *table = &self->tables[index];
        if (given->like < index)
            *table = self->tables[given->like];
        else {
            int64_t **from = given->in_row ? &own : &next;
            table->sizes = *from;
            *from += given->count;
            table->places = next;
            next += given->count;
        }
        table->least = given->least;
        table->below = given->below;
    }
    self->bases[GIVEN_BASES] = (int64_t)(uintptr_t)memory;
    return next - memory;
}

/* All arrays, one after the other: a program that runs cold touches few pages. */
static int place_arrays(Program *self, const Py_buffer *code, const Py_buffer *flow, const Py_buffer *tables, int lane,
                        int lanes)
{
    const TableOf *given = tables->buf;
    Py_ssize_t count = tables->len / (Py_ssize_t)sizeof(TableOf), slots = self->requests + 1;
    Py_ssize_t words = (code->len + flow->len) / 8 + 3 * (Py_ssize_t)self->number + 3 * slots;
    Py_ssize_t pieces = count ? code->len / 8 : 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        words += (2 + lanes * given[index].in_row) * given[index].count;
        if (index < 2) /* of send and recv */
            self->blocks[index] = given[index].count;
    }
    int64_t *next = self->memory = PyMem_Calloc((size_t)(words + 2 * pieces + 1), 8);
    self->statuses = PyMem_Calloc((size_t)slots, (size_t)mpi.status);
    if (!next || !self->statuses) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(self->code = next, code->buf, (size_t)code->len);
    self->length = code->len / 8;
    next += self->length;
    if (self->number) {
        memcpy(next, flow->buf, (size_t)flow->len);
        self->steps = (const Step *)next;
        self->completes = next + self->number * (Py_ssize_t)(sizeof(Step) / 8);
        self->dependents = self->completes + self->requests;
        next += flow->len / 8;
    }
    next += place_tables(self, next, given, count, lane, lanes);
    for (int end = 0; end < 2; end++) {
        self->ready[end] = next;
        next += self->number;
    }
    self->waiting = next;
    self->slots = (char *)(next + self->number);
    self->gathered = self->slots + 8 * slots;
    self->found = (int *)(self->gathered + 8 * slots);
    self->beginnings = (int64_t *)(self->gathered + 16 * slots);
    self->lengths = (int *)(self->beginnings + pieces);
    for (int index = 0; index < self->requests; index++)
        set_null(self, index);
    return 0;
}

static int Program_init(Program *self, PyObject *args, PyObject *named)
{
    Py_buffer code, flow, tables;
    unsigned long long flags, window, sleepers;
    long long number, comm, bases[GIVEN_BASES];
    int lane, lanes;
    (void)named;
    if (self->memory)
        PyErr_SetString(PyExc_RuntimeError, "a program is made once");
    if (self->memory || !PyArg_ParseTuple(args, "y*y*LiLii(LLLLL)y*iiKKKO", &code, &flow, &number, &self->requests, &comm,
                                          &self->tag, &self->rank, bases, bases + 1, bases + 2, bases + 3, bases + 4, &tables,
                                          &lane, &lanes, &flags, &window, &sleepers, &self->owners))
        return -1;
    Py_INCREF(self->owners);
    self->number = number;
    self->comm = comm;
    self->flags = (int64_t *)(uintptr_t)flags;
    self->window = (int64_t *)(uintptr_t)window;
    self->sleepers = (int64_t *)(uintptr_t)sleepers;
    for (int base = 0; base < GIVEN_BASES; base++)
        self->bases[base] = bases[base];
    int outcome = -1;
    if (tables.len > TABLES * (Py_ssize_t)sizeof(TableOf))
        PyErr_Format(PyExc_ValueError, "at most %d tables", TABLES);
    else
        outcome = place_arrays(self, &code, &flow, &tables, lane, lanes);
    PyBuffer_Release(&code);
    PyBuffer_Release(&flow);
    PyBuffer_Release(&tables);
    return outcome;
}

static void Program_dealloc(Program *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (!self->active) { /* else MPI may still write to them */
        PyMem_Free(self->memory);
        PyMem_Free(self->statuses);
    }
    Py_XDECREF(self->owners);
    Py_XDECREF(self->name);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *as_bool(int value) { return value < 0 ? NULL : PyBool_FromLong(value); }

static PyObject *Program_run(Program *self, PyObject *none)
{
    (void)none;
    return as_bool(begin_program(self) < 0 ? -1 : advance_program(self, 1));
}

static PyObject *Program_start(Program *self, PyObject *none)
{
    (void)none;
    return as_bool(begin_program(self) < 0 ? -1 : advance_program(self, 0));
}

static PyObject *Program_progress(Program *self, PyObject *block)
{
    return as_bool(self->active ? advance_program(self, PyObject_IsTrue(block)) : 1);
}

static PyObject *Program_move(Program *self, PyObject *args)
{
    long long send, recv;
    if (!PyArg_ParseTuple(args, "LL", &send, &recv))
        return NULL;
    self->bases[0] = send;
    self->bases[1] = recv;
    Py_RETURN_NONE;
}

static PyObject *Program_place(Program *self, PyObject *args)
{
    Py_buffer views[2];
    if (!PyArg_ParseTuple(args, "y*y*", &views[0], &views[1]))
        return NULL;
    Py_ssize_t bytes[2] = {8 * self->blocks[0], 8 * self->blocks[1]};
    int good = views[0].len == bytes[0] + bytes[1] && views[1].len == views[0].len;
    for (int end = 0; end < 2 && good; end++) {
        memcpy(self->tables[end].sizes, (char *)views[0].buf + end * bytes[0], (size_t)bytes[end]);
        memcpy(self->tables[end].places, (char *)views[1].buf + end * bytes[0], (size_t)bytes[end]);
    }
    PyBuffer_Release(&views[0]);
    PyBuffer_Release(&views[1]);
    if (!good)
        return PyErr_Format(PyExc_ValueError, "not the sizes and places of %zd blocks", (bytes[0] + bytes[1]) / 8);
    Py_RETURN_NONE;
}

static int append(PyObject *list, int64_t index)
{
    PyObject *number = PyLong_FromLongLong(index);
    int outcome = number ? PyList_Append(list, number) : -1;
    Py_XDECREF(number);
    return outcome;
}

static PyObject *Program_pending(Program *self, PyObject *none)
{
    (void)none;
    PyObject *slots = PyList_New(0), *flags = PyList_New(0);
    int good = slots && flags;
    for (int index = 0; good && self->active && index < self->requests; index++) {
        int done = 1, code = 0;
        if (get_handle(slot(self, index)) != get_handle((char *)&mpi.null))
            code = ((test_any)mpi.test)(slot(self, index), &done, self->statuses);
        good = (!code && done) || append(slots, index) == 0;
    }
    const int64_t *words = self->code + self->at;
    if (good && self->active && !self->steps && self->at < self->length && words[0] == FLAGS)
        for (Py_ssize_t each = self->seen; good && each < words[1] - 3; each++)
            good = self->flags[words[3 + each]] >= *self->window - words[2] || append(flags, words[3 + each]) == 0;
    if (good)
        return Py_BuildValue("(NNn)", slots, flags, self->at);
    Py_XDECREF(slots);
    Py_XDECREF(flags);
    return NULL;
}

static PyObject *Program_free(Program *self, PyObject *none)
{
    (void)none;
    self->is_freed = 1;
    Py_RETURN_NONE;
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)Program_run, METH_NOARGS, "Start, and wait until everything is done."},
    {"start", (PyCFunction)Program_start, METH_NOARGS, "Begin a start; whether everything is done already."},
    {"progress", (PyCFunction)Program_progress, METH_O, "Go on, if asked to until everything is done; whether it is."},
    {"move", (PyCFunction)Program_move, METH_VARARGS, "The addresses of the send and the receive buffer from now on."},
    {"place", (PyCFunction)Program_place, METH_VARARGS, "Sizes and places of all blocks from now on, in bytes."},
    {"pending", (PyCFunction)Program_pending, METH_NOARGS,
     "Slots of requests that are not complete, flags that are not raised, and the word that it has come to."},
    {"free", (PyCFunction)Program_free, METH_NOARGS, "It is not started any more."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef program_members[] = {
    {"used", T_LONGLONG, offsetof(Program, used), 0, "When it was used last, in calls of its session."},
    {"name", T_OBJECT_EX, offsetof(Program, name), 0, "Of its plan."},
    {"tag", T_INT, offsetof(Program, tag), 0, "The first tag of its messages."},
    {"active", T_INT, offsetof(Program, active), READONLY, "Whether a start is under way."},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot program_slots[] = {{Py_tp_doc, "The steps of one rank, ready to run."},
                                      {Py_tp_init, Program_init},
                                      {Py_tp_dealloc, Program_dealloc},
                                      {Py_tp_methods, program_methods},
                                      {Py_tp_members, program_members},
                                      {0, NULL}};
static PyType_Spec program_spec = {"hiercoll.runtime._engine.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT,
                                   program_slots};
PyTypeObject *program_type;

/* ---- The module */

/* As mpi4py's own calls resolve: what wraps MPI functions for the whole process comes first. NULL if there is none. */
static void *find(void *library, const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    return found || !library ? found : dlsym(library, name);
}

static void *resolve(void *library, const char *name)
{
    void *found = find(library, name);
    if (!found)
        PyErr_Format(PyExc_OSError, "%s is not found", name);
    return found;
}

void *find_collective(const char *name, int *is_large)
{
    char full[64];
    PyOS_snprintf(full, sizeof full, "MPI_%s_c", name);
    void *found = find(mpi.library, full);
    *is_large = found != NULL;
    full[strlen(full) - 2] = 0;
    return found ? found : find(mpi.library, full);
}

static PyObject *engine_setup(PyObject *module, PyObject *args)
{
    const char *path;
    (void)module;
    if (!PyArg_ParseTuple(args, "siLLinO", &path, &mpi.width, &mpi.null, &mpi.byte, &mpi.any_tag, &mpi.status,
                          &mpi.exception))
        return NULL;
    Py_INCREF(mpi.exception);
    if (mpi.width != 4 && mpi.width != 8)
        return PyErr_Format(PyExc_OSError, "handles have %d bytes", mpi.width);
    void *library = mpi.library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
    int good = (mpi.isend = resolve(library, "MPI_Isend")) && (mpi.irecv = resolve(library, "MPI_Irecv")) &&
               (mpi.testall = resolve(library, "MPI_Testall")) && (mpi.testsome = resolve(library, "MPI_Testsome")) &&
               (mpi.test = resolve(library, "MPI_Test")) && (mpi.iprobe = resolve(library, "MPI_Iprobe")) &&
               (mpi.hindexed = resolve(library, "MPI_Type_create_hindexed")) &&
               (mpi.commit = resolve(library, "MPI_Type_commit")) &&
               (mpi.free_type = resolve(library, "MPI_Type_free")) &&
               (mpi.reduce_local = resolve(library, "MPI_Reduce_local")) &&
               (mpi_create_keyval = resolve(library, "MPI_Comm_create_keyval")) &&
               (mpi_get_attribute = resolve(library, "MPI_Comm_get_attr")) &&
               (mpi_set_attribute = resolve(library, "MPI_Comm_set_attr")) &&
               (mpi_rank = resolve(library, "MPI_Comm_rank")) && (mpi_size = resolve(library, "MPI_Comm_size")) &&
               (mpi_test_inter = resolve(library, "MPI_Comm_test_inter")) &&
               (mpi_group = resolve(library, "MPI_Comm_group")) &&
               (mpi_translate_ranks = resolve(library, "MPI_Group_translate_ranks")) &&
               (mpi_free_group = resolve(library, "MPI_Group_free"));
    return good ? Py_BuildValue("") : NULL;
}

static PyMethodDef functions[] = {
    {"setup", engine_setup, METH_VARARGS,
     "setup(library, width, null, byte, any_tag, status, exception): find the functions of the MPI library."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_engine", "The compiled engine.", -1, functions,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__engine(void)
{
    PyObject *module = PyModule_Create(&definition), *program = PyType_FromSpec(&program_spec);
    program_type = (PyTypeObject *)program;
    if (!module || !program || PyModule_AddObject(module, "Program", program) < 0 || add_calls(module) < 0 ||
        add_regions(module) < 0 || add_attributes(module) < 0 || add_communicators(module) < 0)
        return NULL;
    return module;
}
