/* The compiled engine: runs the steps of one rank, and finds them from the arguments of a call.
 *
 * It includes no header of an MPI library: it is given the addresses of the few functions that it calls, and the
 * width of a handle (4 bytes with MPICH and its kin, 8 with Open MPI and the ABI of MPI 5), so that one build serves
 * every MPI library. Messages are begun anew at each start, relative to bases that each start may have others of:
 * what has been compiled for one pair of buffers runs on every other one.
 *
 * A program is an array of 64-bit words, made by compiled.py; see `enum kind`. They are done one after the other; or,
 * where there is a flow of steps, a step's words are done as soon as all steps that it needs are complete. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum {
    LOOKS = 8,            /* at what is waited for, before others are let run */
    PROGRESS_EVERY = 8,   /* looks at flags, between calls that let the MPI library go on */
    CLOCK_EVERY = 64,     /* looks between those at the clock */
    BASES = 4,            /* send, recv, scratch, shared */
    MOST_KNOWN = 256,     /* calls on a communicator */
    MOST_NATIVE = 64,     /* sizes that are known to be left to the MPI library */
    KEY_BYTES = 512,
    FORMAT_BYTES = 8,
    SLOTS = 32            /* methods */
};
static const double SIGNALS_EVERY = 0.05; /* seconds, between looks for Ctrl-C */

/* Words after the kind and the number of words of each step. */
enum kind {
    SEND,   /* base, offset, count, datatype, peer, tag, slot of the request */
    RECEIVE,
    WAIT,   /* slots of requests .. */
    COPY,   /* base, offset, base, offset of the target, bytes, pieces, distance of pieces, and in the target */
    RAISE,  /* index of a flag */
    FLAGS,  /* starts back, indices of flags .. */
    DONE,   /* step of a flow that is complete with the one that begins it: its message has no bytes */
    SEND_BLOCK,    /* base (send or recv), block, peer, tag, slot: where and as long as this start's tables say */
    RECEIVE_BLOCK,
    COPY_BLOCK     /* base, block, base, block of the target */
};

/* A step of a flow: its words, how many steps it needs, and which need it. It is complete when its words are done; one
 * that ``begins`` messages completes nothing, others are complete with them. */
typedef struct {
    int64_t from, to, needs, first, last, begins;
} Step;

/* ---- The MPI library ------------------------------------------------------------------------------------------ */

static struct {
    void *isend, *irecv, *testall, *testsome, *test, *iprobe;
    int width;            /* bytes of a handle */
    int64_t null, byte;   /* MPI_REQUEST_NULL, MPI_BYTE */
    int any_tag;
    Py_ssize_t status;    /* bytes */
    PyObject *exception;  /* MPI.Exception */
} mpi;

static int64_t get_handle(const char *at)
{
    if (mpi.width == 4) {
        int32_t handle;
        memcpy(&handle, at, 4);
        return handle;
    }
    int64_t handle;
    memcpy(&handle, at, 8);
    return handle;
}

static void set_handle(char *at, int64_t handle)
{
    int32_t narrow = (int32_t)handle;
    memcpy(at, mpi.width == 4 ? (void *)&narrow : (void *)&handle, (size_t)mpi.width);
}

typedef int (*message_int)(void *, int, int, int, int, int, void *);
typedef int (*message_pointer)(void *, int, void *, int, int, void *, void *);
typedef int (*testall_any)(int, void *, int *, void *);
typedef int (*testsome_any)(int, void *, int *, int *, void *);
typedef int (*test_any)(void *, int *, void *);
typedef int (*iprobe_int)(int, int, int, int *, void *);
typedef int (*iprobe_pointer)(int, int, void *, int *, void *);

static int begin_message(void *function, void *at, int count, int64_t type, int peer, int tag, int64_t comm, char *request)
{
    if (mpi.width == 4)
        return ((message_int)function)(at, count, (int)type, peer, tag, (int)comm, request);
    return ((message_pointer)function)(at, count, (void *)type, peer, tag, (void *)comm, request);
}

/* ---- Programs ------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *code_bytes, *owners;
    const int64_t *code;
    Py_ssize_t length, at;        /* words; the step that the current start has come to */
    Py_ssize_t seen;              /* flags of that step that are raised */
    int awaited;                  /* whether its requests are gathered */
    int active, is_freed, requests;
    char *slots, *gathered, *statuses;
    int64_t *flow;                /* what follows, in one piece; NULL: in sequence */
    const Step *steps;
    const int64_t *dependents, *completes; /* of all steps; by slot, the step that is complete with its message */
    int64_t number, left;         /* steps; those that are to be completed in the current start */
    int64_t *waiting, *ready[2];  /* by step, for how many others; steps to be launched: local ones, and messages */
    int64_t ready_count[2];
    int *found;                   /* slots, by the MPI library */
    int64_t bases[BASES], comm;
    Py_ssize_t blocks[2];         /* of send and recv, where their sizes are given with each start */
    int64_t *sizes[2], *places[2];
    int tag, rank;
    int64_t *flags, *window;      /* of the window: its flags; the number of starts, and when it was used last */
    int64_t used;                 /* when the program was, in calls */
} Program;

static const char *no_memory = "no memory for a program";

static int Program_init(Program *self, PyObject *args, PyObject *named)
{
    static char *names[] = {"code", "flow", "steps", "requests", "comm", "tag", "rank", "bases", "blocks",
                            "flags", "window", "owners", NULL};
    Py_buffer code, flow;
    long long comm, bases[BASES];
    unsigned long long flags, window;
    PyObject *owners;
    if (!PyArg_ParseTupleAndKeywords(args, named, "y*y*LiLii(LLLL)(nn)KKO", names, &code, &flow, &self->number,
                                     &self->requests, &comm, &self->tag, &self->rank, &bases[0], &bases[1], &bases[2], &bases[3],
                                     &self->blocks[0], &self->blocks[1], &flags, &window, &owners))
        return -1;
    self->length = code.len / 8;
    self->code = PyMem_Malloc((size_t)code.len + 1);
    size_t handles = (size_t)(self->requests + 1) * 8;
    self->slots = PyMem_Malloc(handles);
    self->gathered = PyMem_Malloc(handles);
    self->statuses = PyMem_Malloc((size_t)(self->requests + 1) * (size_t)mpi.status);
    size_t number = (size_t)self->number, tables = (size_t)(self->blocks[0] + self->blocks[1]);
    self->sizes[0] = PyMem_Calloc(2 * tables + 1, 8);
    if (self->sizes[0]) {
        self->places[0] = self->sizes[0] + self->blocks[0];
        self->sizes[1] = self->places[0] + self->blocks[0];
        self->places[1] = self->sizes[1] + self->blocks[1];
    }
    self->found = PyMem_Malloc((size_t)(self->requests + 1) * sizeof(int));
    self->flow = number ? PyMem_Malloc((size_t)flow.len + 3 * number * 8) : NULL;
    int good = self->sizes[0] && self->code && self->slots && self->gathered && self->statuses && self->found && (self->flow || !number);
    if (good) {
        memcpy((void *)self->code, code.buf, (size_t)code.len);
        if (number) {
            memcpy(self->flow, flow.buf, (size_t)flow.len);
            self->steps = (const Step *)self->flow;
            self->completes = self->flow + number * 6;
            self->dependents = self->completes + self->requests;
            self->waiting = self->flow + flow.len / 8;
            self->ready[0] = self->waiting + number;
            self->ready[1] = self->ready[0] + number;
        }
    }
    PyBuffer_Release(&code);
    PyBuffer_Release(&flow);
    if (!good) {
        PyErr_SetString(PyExc_MemoryError, no_memory);
        return -1;
    }
    for (int slot = 0; slot < self->requests; slot++)
        set_handle(self->slots + slot * mpi.width, mpi.null);
    for (int base = 0; base < BASES; base++)
        self->bases[base] = bases[base];
    self->comm = comm;
    self->flags = (int64_t *)(uintptr_t)flags;
    self->window = (int64_t *)(uintptr_t)window;
    Py_INCREF(owners);
    self->owners = owners;
    return 0;
}

static void Program_dealloc(Program *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (!self->active) { /* else MPI may still write to them */
        PyMem_Free(self->slots);
        PyMem_Free(self->gathered);
        PyMem_Free(self->statuses);
        PyMem_Free(self->found);
    }
    PyMem_Free(self->flow);
    PyMem_Free(self->sizes[0]);
    PyMem_Free((void *)self->code);
    Py_XDECREF(self->owners);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int failed(int code)
{
    PyObject *error = PyObject_CallFunction(mpi.exception, "i", code);
    if (error) {
        PyErr_SetObject(mpi.exception, error);
        Py_DECREF(error);
    }
    return -1;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Looks return 1 for complete, 0 for not yet, or less: the error code of the MPI library, negated. */
static int look_at_requests(Program *self, Py_ssize_t count, unsigned look)
{
    (void)look;
    int done = 0, code = ((testall_any)mpi.testall)((int)count, self->gathered, &done, self->statuses);
    return code ? -code : done;
}

static int look_at_flags(Program *self, Py_ssize_t count, unsigned look)
{
    const int64_t *step = self->code + self->at;
    int64_t goal = *self->window - step[2];
    while (self->seen < count && __atomic_load_n(self->flags + step[3 + self->seen], __ATOMIC_ACQUIRE) >= goal)
        self->seen++;
    if (self->seen == count)
        return 1;
    if (look % PROGRESS_EVERY == PROGRESS_EVERY - 1) {
        /* What others wait for may still be in the library's queues: a large message needs its receiver. */
        int found, code;
        if (mpi.width == 4)
            code = ((iprobe_int)mpi.iprobe)(self->rank, mpi.any_tag, (int)self->comm, &found, self->statuses);
        else
            code = ((iprobe_pointer)mpi.iprobe)(self->rank, mpi.any_tag, (void *)self->comm, &found, self->statuses);
        return -code;
    }
    return 0;
}

static void complete_step(Program *self, int64_t step)
{
    self->left--;
    for (int64_t each = self->steps[step].first; each < self->steps[step].last; each++) {
        int64_t dependent = self->dependents[each];
        if (--self->waiting[dependent] == 0) {
            int begins = self->steps[dependent].begins != 0;
            self->ready[begins][self->ready_count[begins]++] = dependent;
        }
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

typedef int (*look_at)(Program *, Py_ssize_t, unsigned);

/* 1 when complete; 0 if not, and not to ``block``; -1 with an exception. Without the GIL where it takes longer. */
static int await(Program *self, look_at complete, Py_ssize_t count, int block)
{
    int found = 0;
    unsigned look = 0;
    for (; look < LOOKS && !found; look++)
        found = complete(self, count, look);
    if (!found && !block) {
        if (complete == look_at_flags) /* let the library go on: who only asks does nothing else for it */
            found = complete(self, count, PROGRESS_EVERY - 1);
        if (!found)
            return 0;
    }
    if (!found) {
        PyThreadState *thread = PyEval_SaveThread();
        double checked = 0;
        for (; !found; look++) {
            sched_yield();
            found = complete(self, count, look);
            if (found || look % CLOCK_EVERY)
                continue;
            double time = now();
            if (time - checked > SIGNALS_EVERY) {
                PyEval_RestoreThread(thread);
                if (PyErr_CheckSignals() < 0)
                    return -1;
                thread = PyEval_SaveThread();
                checked = time;
            }
        }
        PyEval_RestoreThread(thread);
    }
    return found > 0 ? 1 : failed(-found);
}

static void copy(const int64_t *bases, const int64_t *step)
{
    const char *source = (const char *)(uintptr_t)(bases[step[2]] + step[3]);
    char *target = (char *)(uintptr_t)(bases[step[4]] + step[5]);
    for (int64_t piece = 0; piece < step[7]; piece++, source += step[8], target += step[9])
        memmove(target, source, (size_t)step[6]);
}

static int wait_for_messages(Program *self, const int64_t *step, int block)
{
    Py_ssize_t count = step[1] - 2;
    size_t width = (size_t)mpi.width;
    if (!self->awaited) {
        for (Py_ssize_t each = 0; each < count; each++)
            memcpy(self->gathered + each * mpi.width, self->slots + step[2 + each] * mpi.width, width);
        self->awaited = 1;
    }
    int done = await(self, look_at_requests, count, block);
    if (done > 0) {
        for (Py_ssize_t each = 0; each < count; each++)
            set_handle(self->slots + step[2 + each] * mpi.width, mpi.null);
        self->awaited = 0;
    }
    return done;
}

static int begin_block(Program *self, const int64_t *step)
{
    int64_t count = self->sizes[step[2]][step[3]];
    if (!count) { /* as the other end knows, too */
        if (self->flow)
            complete_step(self, self->completes[step[6]]);
        return 1;
    }
    int code = begin_message(step[0] == SEND_BLOCK ? mpi.isend : mpi.irecv,
                             (void *)(uintptr_t)(self->bases[step[2]] + self->places[step[2]][step[3]]), (int)count,
                             mpi.byte, (int)step[4], self->tag + (int)step[5], self->comm,
                             self->slots + step[6] * mpi.width);
    return code ? failed(code) : 1;
}

/* Do the words of a step: 1 when that is done, 0 if not, -1 with an exception. */
static int do_words(Program *self, const int64_t *step, int block)
{
    int done = 1, code;
    switch ((enum kind)step[0]) {
    case SEND:
    case RECEIVE:
        code = begin_message(step[0] == SEND ? mpi.isend : mpi.irecv,
                             (void *)(uintptr_t)(self->bases[step[2]] + step[3]), (int)step[4], step[5], (int)step[6],
                             self->tag + (int)step[7], self->comm, self->slots + step[8] * mpi.width);
        return code ? failed(code) : 1;
    case WAIT:
        return wait_for_messages(self, step, block);
    case COPY:
        copy(self->bases, step);
        break;
    case RAISE:
        __atomic_store_n(self->flags + step[2], *self->window, __ATOMIC_RELEASE);
        break;
    case FLAGS:
        done = await(self, look_at_flags, step[1] - 3, block);
        if (done > 0)
            self->seen = 0;
        break;
    case DONE:
        complete_step(self, step[2]);
        break;
    case SEND_BLOCK:
    case RECEIVE_BLOCK:
        return begin_block(self, step);
    case COPY_BLOCK:
        memmove((void *)(uintptr_t)(self->bases[step[4]] + self->places[step[4]][step[5]]),
                (void *)(uintptr_t)(self->bases[step[2]] + self->places[step[2]][step[3]]),
                (size_t)self->sizes[step[2]][step[3]]);
        break;
    }
    return done;
}

/* Launch all steps that are ready, and what becomes ready by that; messages first, so that they travel while this rank
 * copies. */
static int launch(Program *self)
{
    while (self->ready_count[0] || self->ready_count[1]) {
        int begins = self->ready_count[1] > 0;
        int64_t index = self->ready[begins][--self->ready_count[begins]];
        const Step *step = &self->steps[index];
        for (int64_t at = step->from; at < step->to; at += self->code[at + 1])
            if (do_words(self, self->code + at, 0) < 0)
                return -1;
        if (!begins)
            complete_step(self, index);
    }
    return 1;
}

/* Go on: 1 when all is done, 0 if not, -1 with an exception. */
static int advance(Program *self, int block)
{
    int done = 1;
    if (self->flow)
        for (;;) {
            if (launch(self) < 0)
                return -1;
            if (!self->left)
                break;
            if ((done = await(self, look_at_any_request, self->requests, block)) <= 0)
                return done;
        }
    else
        while (self->at < self->length) {
            const int64_t *step = self->code + self->at;
            if ((done = do_words(self, step, block)) <= 0)
                return done;
            self->at += step[1];
        }
    self->active = 0;
    return 1;
}

static int begin(Program *self)
{
    if (self->active || self->is_freed) {
        PyErr_SetString(PyExc_RuntimeError, self->active ? "a program is active" : "a program has been freed");
        return -1;
    }
    self->active = 1;
    self->at = self->seen = self->awaited = 0;
    if (self->window)
        ++*self->window;
    if (self->flow) {
        self->left = self->ready_count[0] = self->ready_count[1] = 0;
        for (int64_t step = 0; step < self->number; step++) {
            int begins = self->steps[step].begins != 0;
            self->left += !begins;
            self->waiting[step] = self->steps[step].needs;
            if (!self->waiting[step])
                self->ready[begins][self->ready_count[begins]++] = step;
        }
    }
    return 0;
}

static PyObject *as_bool(int value)
{
    return value < 0 ? NULL : PyBool_FromLong(value);
}

static PyObject *Program_run(Program *self, PyObject *none)
{
    (void)none;
    if (begin(self) < 0)
        return NULL;
    return as_bool(advance(self, 1));
}

static PyObject *Program_start(Program *self, PyObject *none)
{
    (void)none;
    if (begin(self) < 0)
        return NULL;
    return as_bool(advance(self, 0));
}

static PyObject *Program_progress(Program *self, PyObject *block)
{
    if (!self->active)
        Py_RETURN_TRUE;
    return as_bool(advance(self, PyObject_IsTrue(block)));
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

/* place(sizes, places) of the blocks of send and then of recv, in bytes, 64 bits each. */
static PyObject *Program_place(Program *self, PyObject *args)
{
    Py_buffer sizes, places;
    if (!PyArg_ParseTuple(args, "y*y*", &sizes, &places))
        return NULL;
    Py_ssize_t first = self->blocks[0], all = first + self->blocks[1];
    int good = sizes.len == 8 * all && places.len == 8 * all;
    if (good) {
        memcpy(self->sizes[0], sizes.buf, 8 * (size_t)first);
        memcpy(self->sizes[1], (int64_t *)sizes.buf + first, 8 * (size_t)(all - first));
        memcpy(self->places[0], places.buf, 8 * (size_t)first);
        memcpy(self->places[1], (int64_t *)places.buf + first, 8 * (size_t)(all - first));
    }
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&places);
    if (!good)
        return PyErr_Format(PyExc_ValueError, "not the sizes and places of %zd blocks", all);
    Py_RETURN_NONE;
}

/* Append an index to a list; 0, or -1 with an exception. */
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
    if (!slots || !flags)
        goto error;
    const int64_t *step = self->code + self->at;
    int is_waiting = self->active && !self->flow && self->at < self->length;
    if (self->active)
        for (int slot = 0; slot < self->requests; slot++) {
            char *request = self->slots + slot * mpi.width;
            int done = 1;
            if (get_handle(request) == mpi.null)
                continue;
            int code = ((test_any)mpi.test)(request, &done, self->statuses);
            if ((code || !done) && append(slots, slot) < 0)
                goto error;
        }
    if (is_waiting && step[0] == FLAGS)
        for (Py_ssize_t each = self->seen; each < step[1] - 3; each++)
            if (self->flags[step[3 + each]] < *self->window - step[2] && append(flags, step[3 + each]) < 0)
                goto error;
    return Py_BuildValue("(NNn)", slots, flags, self->at);
error:
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

static PyObject *get_used(Program *self, void *closure)
{
    (void)closure;
    return PyLong_FromLongLong(self->used);
}

static int set_used(Program *self, PyObject *value, void *closure)
{
    (void)closure;
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "used");
        return -1;
    }
    self->used = PyLong_AsLongLong(value);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *get_active(Program *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(self->active);
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

static PyGetSetDef program_fields[] = {
    {"used", (getter)get_used, (setter)set_used, "When it was used last, in calls of its session.", NULL},
    {"active", (getter)get_active, NULL, "Whether a start is under way.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot program_slots[] = {{Py_tp_doc, "Steps in sequence, ready to run."},
                                      {Py_tp_init, Program_init},
                                      {Py_tp_dealloc, Program_dealloc},
                                      {Py_tp_methods, program_methods},
                                      {Py_tp_getset, program_fields},
                                      {0, NULL}};
static PyType_Spec program_spec = {"hiercoll.runtime._engine.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT,
                                   program_slots};
static PyTypeObject *program_type;

/* ---- From the arguments of a call to its program -------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *known;   /* programs, or mpi4py's methods, by key */
    PyObject *failed;  /* called with a program in which an exception was raised */
    int is_open;       /* whether calls may be served here */
    int sizes;
    struct {
        const PyObject *collective;
        int64_t bytes;
    } native[MOST_NATIVE];
    int64_t calls;
} Routes;

static struct {
    PyTypeObject *comm, *array;
    Py_ssize_t comm_offset;       /* of the handle in a communicator object */
    PyObject *background, *observers; /* lists: calls go past here while there is something in them */
    PyObject *routes;             /* of each communicator, by handle */
    PyObject *automatic, *plain;  /* "auto"; no parameters */
    int64_t last_handle;
    Routes *last;                 /* borrowed from ``routes`` */
} calls;

static Routes *find_routes(PyObject *comm)
{
    if (!calls.comm || !PyType_IsSubtype(Py_TYPE(comm), calls.comm))
        return NULL;
    int64_t handle = get_handle((char *)comm + calls.comm_offset);
    if (!calls.last || handle != calls.last_handle) {
        PyObject *number = PyLong_FromLongLong(handle);
        calls.last = number ? (Routes *)PyDict_GetItemWithError(calls.routes, number) : NULL;
        calls.last_handle = handle;
        Py_XDECREF(number);
    }
    Routes *found = calls.last;
    if (!found || !found->is_open || PyList_Size(calls.background))
        return NULL;
    return found;
}

typedef struct {
    char bytes[KEY_BYTES];
    size_t length;
} Key;

static int add(Key *key, const void *from, size_t count)
{
    if (key->length + count > KEY_BYTES)
        return -1;
    memcpy(key->bytes + key->length, from, count);
    key->length += count;
    return 0;
}

static int add_number(Key *key, int64_t number)
{
    return add(key, &number, 8);
}

static int add_text(Key *key, PyObject *text)
{
    Py_ssize_t length;
    const char *from;
    if (!PyUnicode_CheckExact(text) || !(from = PyUnicode_AsUTF8AndSize(text, &length)))
        return -1;
    unsigned char count = (unsigned char)length;
    return length > 255 || add(key, &count, 1) < 0 ? -1 : add(key, from, (size_t)length);
}

static int add_buffer(Key *key, const Py_buffer *view)
{
    char format[FORMAT_BYTES] = {0};
    size_t length = view->format ? strlen(view->format) : 0;
    if (length >= FORMAT_BYTES)
        return -1;
    memcpy(format, view->format, length);
    return add_number(key, view->len) < 0 ? -1 : add(key, format, FORMAT_BYTES);
}

/* Whatever is not a whole number or a text (True and 2.0 equal numbers) is for Python to refuse. */
static int add_parameters(Key *key, PyObject *params)
{
    PyObject *name, *value;
    Py_ssize_t position = 0;
    if (!PyDict_CheckExact(params))
        return -1;
    while (PyDict_Next(params, &position, &name, &value)) {
        if (add_text(key, name) < 0)
            return -1;
        if (PyLong_CheckExact(value)) {
            int overflow;
            long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow || add(key, "", 1) < 0 || add_number(key, number) < 0)
                return -1;
        } else if (add_text(key, value) < 0)
            return -1;
    }
    return 0;
}

/* Buffers of a call, and what tells it from others. */
typedef struct {
    Py_buffer send, recv;
    int views;
    Key key;
} Call;

static void end_call(Call *call)
{
    if (call->views > 1)
        PyBuffer_Release(&call->send);
    if (call->views > 0)
        PyBuffer_Release(&call->recv);
}

static int view_recv(Call *call, PyObject *recv)
{
    call->views = 0;
    if (Py_TYPE(recv) != calls.array)
        return -1;
    if (PyObject_GetBuffer(recv, &call->recv, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS) < 0)
        return -1;
    call->views = 1;
    return 0;
}

/* 0, or -1 (perhaps with an exception, of no interest) for what Python is to look at. */
static int describe(Call *call, PyObject *collective, PyObject *send, PyObject *root, PyObject *algorithm,
                    PyObject *transport, PyObject *params)
{
    Key *key = &call->key;
    key->length = 0;
    if (root && !PyLong_CheckExact(root))
        return -1;
    long long number = root ? PyLong_AsLongLong(root) : 0;
    if ((number == -1 && PyErr_Occurred()) || add_number(key, (int64_t)(uintptr_t)collective) < 0 || add_number(key, number) < 0 ||
        add_buffer(key, &call->recv) < 0)
        return -1;
    if (send != Py_None) {
        if (Py_TYPE(send) != calls.array ||
            PyObject_GetBuffer(send, &call->send, PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS) < 0)
            return -1;
        call->views = 2;
        const char *to = call->recv.buf, *from = call->send.buf;
        if (from < to + call->recv.len && to < from + call->send.len)
            return -1;
        if (add_buffer(key, &call->send) < 0)
            return -1;
    }
    if (add_text(key, algorithm) < 0 || add_text(key, transport) < 0)
        return -1;
    return PyDict_Size(params) ? add_parameters(key, params) : 0;
}

/* mpi4py's own call; ``native`` is a function of communicators, or (``comm`` is NULL) the method of one. */
static PyObject *call_native(PyObject *native, PyObject *comm, PyObject *send, PyObject *recv, PyObject *root)
{
    PyObject *first = send == Py_None ? recv : send, *second = send == Py_None ? root : recv;
    if (!comm)
        return PyObject_CallFunctionObjArgs(native, first, second, NULL);
    return PyObject_CallFunctionObjArgs(native, comm, first, second, NULL);
}

/* What serves calls with this key, borrowed; NULL, perhaps with an exception, if that is not known. */
static PyObject *find(Routes *routes, const Key *key)
{
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    PyObject *found = bytes ? PyDict_GetItemWithError(routes->known, bytes) : NULL;
    Py_XDECREF(bytes);
    return found;
}

/* Let calls with this key be served by the target: 1, or -1 with an exception. */
static int keep(Routes *routes, const Key *key, PyObject *target)
{
    if (PyDict_Size(routes->known) >= MOST_KNOWN)
        PyDict_Clear(routes->known);
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    int outcome = bytes && PyDict_SetItem(routes->known, bytes, target) == 0 ? 1 : -1;
    Py_XDECREF(bytes);
    return outcome;
}

/* Run a program on the buffers of a call: 1, or -1 with an exception, of which the session is told. */
static int run(Routes *routes, Program *program, const Call *call)
{
    Py_INCREF((PyObject *)program);
    program->used = ++routes->calls;
    if (program->window)
        program->window[1] = routes->calls;
    program->bases[0] = call->views > 1 ? (int64_t)(uintptr_t)call->send.buf : 0;
    program->bases[1] = (int64_t)(uintptr_t)call->recv.buf;
    int outcome = begin(program) < 0 ? -1 : advance(program, 1);
    if (outcome < 0) {
        PyObject *kind, *error, *trace;
        routes->is_open = 0;
        PyErr_Fetch(&kind, &error, &trace);
        PyObject *done = PyObject_CallFunctionObjArgs(routes->failed, (PyObject *)program, NULL);
        Py_XDECREF(done);
        PyErr_Restore(kind, error, trace);
    }
    Py_DECREF((PyObject *)program);
    return outcome;
}

/* 1 if a call was served, 0 if Python is to serve it, -1 with an exception. */
static int serve(Routes *routes, Call *call, PyObject *send, PyObject *recv, PyObject *root)
{
    PyObject *found = find(routes, &call->key);
    if (!found)
        return PyErr_Occurred() ? -1 : 0;
    if (Py_TYPE(found) != program_type) {
        if (!PyBuffer_IsContiguous(&call->recv, 'C') || (call->views > 1 && !PyBuffer_IsContiguous(&call->send, 'C')))
            return 0; /* mpi4py takes no other order */
        PyObject *done = call_native(found, NULL, send, recv, root);
        Py_XDECREF(done);
        return done ? 1 : -1;
    }
    Program *program = (Program *)found;
    return program->is_freed || program->active ? 0 : run(routes, program, call);
}

/* call(collective, comm, send, recv, root, algorithm, transport, params): whether it was served. */
static PyObject *engine_call(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "call() takes 8 arguments");
        return NULL;
    }
    Routes *routes = find_routes(args[1]);
    if (!routes)
        Py_RETURN_FALSE;
    Call call;
    int outcome = 0;
    if (view_recv(&call, args[3]) == 0 &&
        describe(&call, args[0], args[2], args[4], args[5], args[6], args[7]) == 0)
        outcome = serve(routes, &call, args[2], args[3], args[4]);
    else
        PyErr_Clear();
    end_call(&call);
    return as_bool(outcome);
}

/* Whole numbers of a list or of an array of signed ones; 0, or -1 for what Python is to look at. */
static int read_numbers(PyObject *from, int64_t *numbers, Py_ssize_t count)
{
    if (PyList_CheckExact(from)) {
        if (PyList_Size(from) != count)
            return -1;
        for (Py_ssize_t each = 0; each < count; each++) {
            PyObject *number = PyList_GetItem(from, each);
            if (!PyLong_CheckExact(number))
                return -1;
            numbers[each] = PyLong_AsLongLong(number); /* too large ones: -1, which is refused below */
        }
        return 0;
    }
    Py_buffer view;
    if (Py_TYPE(from) != calls.array || PyObject_GetBuffer(from, &view, PyBUF_FORMAT | PyBUF_ND) < 0)
        return -1;
    int good = view.ndim == 1 && view.len == count * view.itemsize && view.format && !view.format[1] &&
               strchr("ilq", view.format[0]) && (view.itemsize == 4 || view.itemsize == 8);
    if (good && view.itemsize == 8)
        memcpy(numbers, view.buf, (size_t)view.len);
    else if (good)
        for (Py_ssize_t each = 0; each < count; each++)
            numbers[each] = ((int32_t *)view.buf)[each];
    PyBuffer_Release(&view);
    return good ? 0 : -1;
}

/* Sizes and places of blocks in bytes, of an array's counts or of (counts, displacements) in its elements; 0, or -1 for
 * what Python is to look at: other kinds, and all that is wrong. */
static int read_blocks(PyObject *given, const Py_buffer *view, int64_t *sizes, int64_t *places, Py_ssize_t count)
{
    PyObject *counts = given, *displacements = NULL;
    if (PyTuple_CheckExact(given)) {
        if (PyTuple_Size(given) != 2)
            return -1;
        counts = PyTuple_GetItem(given, 0);
        displacements = PyTuple_GetItem(given, 1);
    }
    if (read_numbers(counts, sizes, count) < 0 || (displacements && read_numbers(displacements, places, count) < 0))
        return -1;
    int64_t next = 0, item = view->itemsize, most = view->len / item;
    for (Py_ssize_t each = 0; each < count; each++) {
        int64_t size = sizes[each], place = displacements ? places[each] : next;
        if (size < 0 || size > most || size * item > INT32_MAX || place < 0 || (size && place > most - size))
            return -1;
        next = place + size;
        sizes[each] = size * item;
        places[each] = place * item;
    }
    return 0;
}

/* An array and what says which blocks it has: of a list or a tuple of two, or all of an array (which has one). */
static int view_blocks(PyObject *given, Py_buffer *view, PyObject **blocks, int flags)
{
    PyObject *array = given;
    *blocks = NULL;
    if (PyList_CheckExact(given) && PyList_Size(given) == 2) {
        array = PyList_GetItem(given, 0);
        *blocks = PyList_GetItem(given, 1);
    } else if (PyTuple_CheckExact(given) && PyTuple_Size(given) == 2) {
        array = PyTuple_GetItem(given, 0);
        *blocks = PyTuple_GetItem(given, 1);
    }
    if (Py_TYPE(array) != calls.array)
        return -1;
    return PyObject_GetBuffer(array, view, flags | PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS);
}

/* What tells a call with blocks of any sizes from others: all but the sizes, which are given with each start. */
static int describe_blocks(Call *call, PyObject *collective, PyObject *send, PyObject *recv, PyObject *algorithm,
                           PyObject *params, PyObject *blocks[2])
{
    Key *key = &call->key;
    key->length = 0;
    call->views = 0;
    if (view_blocks(recv, &call->recv, &blocks[1], PyBUF_WRITABLE) < 0)
        return -1;
    call->views = 1;
    if (view_blocks(send, &call->send, &blocks[0], 0) < 0)
        return -1;
    call->views = 2;
    if (!blocks[1] || !call->send.itemsize || !call->recv.itemsize ||
        add_number(key, (int64_t)(uintptr_t)collective) < 0 || add_number(key, blocks[0] != NULL) < 0 ||
        add_text(key, algorithm) < 0)
        return -1;
    return PyDict_Size(params) ? add_parameters(key, params) : 0;
}

/* call_blocks(collective, comm, send, recv, algorithm, params): of any sizes; whether it was served. */
static PyObject *engine_call_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "call_blocks() takes 6 arguments");
        return NULL;
    }
    Routes *routes = find_routes(args[1]);
    if (!routes)
        Py_RETURN_FALSE;
    Call call;
    PyObject *blocks[2];
    Program *program = NULL;
    int outcome = 0;
    if (describe_blocks(&call, args[0], args[2], args[3], args[4], args[5], blocks) == 0) {
        program = (Program *)find(routes, &call.key);
        if (program && !program->is_freed && !program->active) {
            Py_ssize_t *number = program->blocks;
            int64_t **sizes = program->sizes, **places = program->places;
            int good = read_blocks(blocks[1], &call.recv, sizes[1], places[1], number[1]) == 0;
            if (good && blocks[0])
                good = read_blocks(blocks[0], &call.send, sizes[0], places[0], number[0]) == 0;
            else if (good && (good = call.send.len <= INT32_MAX)) {
                sizes[0][0] = call.send.len;
                places[0][0] = 0;
            }
            if (good && sizes[0][number[0] > 1 ? program->rank : 0] == sizes[1][program->rank])
                outcome = run(routes, program, &call);
        }
    }
    if (!outcome)
        PyErr_Clear();
    end_call(&call);
    return as_bool(outcome);
}

/* remember_blocks(routes, collective, send, recv, algorithm, params, program) */
static PyObject *engine_remember_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "remember_blocks() takes 7 arguments");
        return NULL;
    }
    Call call;
    PyObject *blocks[2];
    int outcome = 0;
    if (describe_blocks(&call, args[1], args[2], args[3], args[4], args[5], blocks) == 0)
        outcome = keep((Routes *)args[0], &call.key, args[6]);
    else
        PyErr_Clear();
    end_call(&call);
    return as_bool(outcome);
}

/* remember(routes, collective, send, recv, root, algorithm, transport, params, target): a program, or mpi4py's method. */
static PyObject *engine_remember(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 9) {
        PyErr_SetString(PyExc_TypeError, "remember() takes 9 arguments");
        return NULL;
    }
    Routes *routes = (Routes *)args[0];
    Call call;
    int outcome = 0;
    if (view_recv(&call, args[3]) == 0 &&
        describe(&call, args[1], args[2], args[4], args[5], args[6], args[7]) == 0) {
        outcome = keep(routes, &call.key, args[8]);
    } else
        PyErr_Clear();
    end_call(&call);
    return as_bool(outcome);
}

static int Routes_init(Routes *self, PyObject *args, PyObject *named)
{
    (void)named;
    PyObject *told;
    if (!PyArg_ParseTuple(args, "O", &told))
        return -1;
    Py_INCREF(told);
    self->failed = told;
    self->known = PyDict_New();
    return self->known ? 0 : -1;
}

static int Routes_traverse(Routes *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->known);
    Py_VISIT(self->failed);
    return 0;
}

static int Routes_clear_references(Routes *self)
{
    Py_CLEAR(self->known);
    Py_CLEAR(self->failed);
    return 0;
}

static void Routes_dealloc(Routes *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Routes_clear_references(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Routes_clear(Routes *self, PyObject *none)
{
    (void)none;
    PyDict_Clear(self->known);
    self->sizes = 0;
    Py_RETURN_NONE;
}

static PyObject *Routes_open(Routes *self, PyObject *open)
{
    self->is_open = PyObject_IsTrue(open);
    Py_RETURN_NONE;
}

static PyObject *Routes_tick(Routes *self, PyObject *none)
{
    (void)none;
    return PyLong_FromLongLong(++self->calls);
}

static PyObject *Routes_add_native(Routes *self, PyObject *args)
{
    PyObject *collective;
    long long bytes;
    if (!PyArg_ParseTuple(args, "OL", &collective, &bytes))
        return NULL;
    if (self->sizes < MOST_NATIVE) {
        self->native[self->sizes].collective = collective;
        self->native[self->sizes++].bytes = bytes;
    }
    Py_RETURN_NONE;
}

static Py_ssize_t Routes_length(Routes *self)
{
    return PyDict_Size(self->known);
}

static PyMethodDef routes_methods[] = {
    {"clear", (PyCFunction)Routes_clear, METH_NOARGS, "Forget all calls."},
    {"open", (PyCFunction)Routes_open, METH_O, "Whether calls may be served here."},
    {"tick", (PyCFunction)Routes_tick, METH_NOARGS, "Count a call; the number of calls."},
    {"add_native", (PyCFunction)Routes_add_native, METH_VARARGS,
     "Calls of this collective that receive so many bytes are left to the MPI library."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot routes_slots[] = {{Py_tp_doc, "Calls on a communicator whose programs are known."},
                                     {Py_tp_init, Routes_init},
                                     {Py_tp_dealloc, Routes_dealloc},
                                     {Py_tp_traverse, Routes_traverse},
                                     {Py_tp_clear, Routes_clear_references},
                                     {Py_tp_methods, routes_methods},
                                     {Py_mp_length, Routes_length},
                                     {0, NULL}};
static PyType_Spec routes_spec = {"hiercoll.runtime._engine.Routes", sizeof(Routes), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, routes_slots};

/* register(handle, routes): of a communicator; None: of one that is no more. */
static PyObject *engine_register(PyObject *module, PyObject *args)
{
    (void)module;
    long long handle;
    PyObject *routes;
    if (!PyArg_ParseTuple(args, "LO", &handle, &routes))
        return NULL;
    calls.last = NULL;
    PyObject *number = PyLong_FromLongLong(handle);
    if (!number)
        return NULL;
    int outcome = 0;
    if (routes != Py_None)
        outcome = PyDict_SetItem(calls.routes, number, routes);
    else if (PyDict_GetItemWithError(calls.routes, number))
        outcome = PyDict_DelItem(calls.routes, number);
    Py_DECREF(number);
    if (outcome < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- Methods of drop-in communicators ------------------------------------------------------------------------- */

/* What a method is of: ``python`` serves what is not known here, ``native`` is mpi4py's own. */
static struct slot {
    int one_buffer;
    PyObject *collective, *python, *native;
    PyMethodDef definition;
} slots[SLOTS];
static int slots_used;

static PyObject *call_with(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *tuple = PyTuple_New(count + 1), *options = named ? PyDict_New() : NULL, *result = NULL;
    if (tuple && (options || !named)) {
        Py_INCREF(self);
        PyTuple_SetItem(tuple, 0, self);
        for (Py_ssize_t each = 0; each < count; each++) {
            Py_INCREF(args[each]);
            PyTuple_SetItem(tuple, each + 1, args[each]);
        }
        int good = 1;
        for (Py_ssize_t each = 0; each < named && good; each++)
            good = PyDict_SetItem(options, PyTuple_GetItem(names, each), args[count + each]) == 0;
        if (good)
            result = PyObject_Call(function, tuple, options);
    }
    Py_XDECREF(tuple);
    Py_XDECREF(options);
    return result;
}

static PyObject *method(int index, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    struct slot *slot = &slots[index];
    Routes *routes = NULL;
    if (!names && (slot->one_buffer ? count == 1 || count == 2 : count == 2) && !PyList_Size(calls.observers))
        routes = find_routes(self);
    if (!routes)
        return call_with(slot->python, self, args, count, names);
    PyObject *send = slot->one_buffer ? Py_None : args[0], *recv = args[slot->one_buffer ? 0 : 1];
    PyObject *root = slot->one_buffer && count == 2 ? args[1] : NULL;
    Call call;
    int outcome = 0, is_native = 0;
    if (view_recv(&call, recv) == 0) {
        if (slot->one_buffer || Py_TYPE(send) == calls.array)
            for (int each = 0; each < routes->sizes && !is_native; each++)
                is_native = routes->native[each].collective == slot->collective && routes->native[each].bytes == call.recv.len;
        if (!is_native && describe(&call, slot->collective, send, root, calls.automatic, calls.automatic, calls.plain) == 0)
            outcome = serve(routes, &call, send, recv, root);
        else
            PyErr_Clear();
    } else
        PyErr_Clear();
    end_call(&call);
    if (outcome < 0)
        return NULL;
    if (outcome)
        Py_RETURN_NONE;
    if (is_native)
        return call_native(slot->native, self, send, recv, root);
    return call_with(slot->python, self, args, count, NULL);
}

#define METHOD(n)                                                                                       \
    static PyObject *method_##n(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) \
    {                                                                                                   \
        return method(n, self, args, count, names);                                                     \
    }
#define EIGHT(x, a, b, c, d, e, f, g, h) x(a) x(b) x(c) x(d) x(e) x(f) x(g) x(h)
EIGHT(METHOD, 0, 1, 2, 3, 4, 5, 6, 7)
EIGHT(METHOD, 8, 9, 10, 11, 12, 13, 14, 15)
EIGHT(METHOD, 16, 17, 18, 19, 20, 21, 22, 23)
EIGHT(METHOD, 24, 25, 26, 27, 28, 29, 30, 31)
#define NAME(n) (PyCFunction)(void (*)(void))method_##n,
static const PyCFunction method_functions[SLOTS] = {
    EIGHT(NAME, 0, 1, 2, 3, 4, 5, 6, 7) EIGHT(NAME, 8, 9, 10, 11, 12, 13, 14, 15)
    EIGHT(NAME, 16, 17, 18, 19, 20, 21, 22, 23) EIGHT(NAME, 24, 25, 26, 27, 28, 29, 30, 31)};

/* method(type, name, collective, one_buffer, python, native): of communicators; None if there are too many. */
static PyObject *engine_method(PyObject *module, PyObject *args)
{
    (void)module;
    PyTypeObject *type;
    const char *name;
    int one_buffer;
    PyObject *collective, *python, *native;
    if (!PyArg_ParseTuple(args, "OsOpOO", &type, &name, &collective, &one_buffer, &python, &native))
        return NULL;
    if (slots_used == SLOTS)
        Py_RETURN_NONE;
    struct slot *slot = &slots[slots_used];
    size_t length = strlen(name) + 1;
    char *kept = PyMem_Malloc(length);
    if (!kept)
        return PyErr_NoMemory();
    memcpy(kept, name, length);
    Py_INCREF(collective);
    Py_INCREF(python);
    Py_INCREF(native);
    slot->collective = collective;
    slot->one_buffer = one_buffer;
    slot->python = python;
    slot->native = native;
    slot->definition.ml_name = kept;
    slot->definition.ml_meth = method_functions[slots_used];
    slot->definition.ml_flags = METH_FASTCALL | METH_KEYWORDS;
    slot->definition.ml_doc = "As mpi4py's.";
    slots_used++;
    return PyDescr_NewMethod(type, &slot->definition);
}

/* ---- Setting up ----------------------------------------------------------------------------------------------- */

/* As mpi4py's own calls resolve: what wraps MPI functions for the whole process comes first. */
static void *resolve(void *library, const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found && library)
        found = dlsym(library, name);
    if (!found)
        PyErr_Format(PyExc_OSError, "%s is not found", name);
    return found;
}

/* setup(library, width, null, byte, any_tag, status, exception, comm, offset, array, background, observers, automatic) */
static PyObject *engine_setup(PyObject *module, PyObject *args)
{
    (void)module;
    const char *path;
    long long null, byte;
    PyObject *exception, *background, *observers, *automatic;
    if (!PyArg_ParseTuple(args, "siLLinOOnOOOO", &path, &mpi.width, &null, &byte, &mpi.any_tag, &mpi.status, &exception,
                          &calls.comm, &calls.comm_offset, &calls.array, &background, &observers, &automatic))
        return NULL;
    if (mpi.width != 4 && mpi.width != 8)
        return PyErr_Format(PyExc_OSError, "handles have %d bytes", mpi.width);
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_LAZY);
    if (!(mpi.isend = resolve(library, "MPI_Isend")) || !(mpi.irecv = resolve(library, "MPI_Irecv")) ||
        !(mpi.testall = resolve(library, "MPI_Testall")) || !(mpi.testsome = resolve(library, "MPI_Testsome")) ||
        !(mpi.test = resolve(library, "MPI_Test")) ||
        !(mpi.iprobe = resolve(library, "MPI_Iprobe")))
        return NULL;
    mpi.null = null;
    mpi.byte = byte;
    Py_INCREF(exception);
    Py_INCREF((PyObject *)calls.comm);
    Py_INCREF((PyObject *)calls.array);
    Py_INCREF(background);
    Py_INCREF(observers);
    Py_INCREF(automatic);
    mpi.exception = exception;
    calls.background = background;
    calls.observers = observers;
    calls.automatic = automatic;
    if (!calls.routes)
        calls.routes = PyDict_New();
    if (!calls.plain)
        calls.plain = PyDict_New();
    if (!calls.routes || !calls.plain)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"setup", engine_setup, METH_VARARGS, "Find the functions of the MPI library. Raises OSError."},
    {"register", engine_register, METH_VARARGS, "The routes of a communicator, or None."},
    {"call", (PyCFunction)(void (*)(void))engine_call, METH_FASTCALL, "Serve a call that is known; whether it is."},
    {"call_blocks", (PyCFunction)(void (*)(void))engine_call_blocks, METH_FASTCALL, "The same with blocks of any sizes."},
    {"remember_blocks", (PyCFunction)(void (*)(void))engine_remember_blocks, METH_FASTCALL, "The same for them."},
    {"remember", (PyCFunction)(void (*)(void))engine_remember, METH_FASTCALL, "A call is served by a program."},
    {"method", engine_method, METH_VARARGS, "A method of communicators that serves calls that are known."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_engine", "The compiled engine.", -1, functions,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__engine(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *program = PyType_FromSpec(&program_spec), *routes = PyType_FromSpec(&routes_spec);
    if (!module || !program || !routes)
        return NULL;
    program_type = (PyTypeObject *)program;
    Py_INCREF(program);
    if (PyModule_AddObject(module, "Program", program) < 0 || PyModule_AddObject(module, "Routes", routes) < 0)
        return NULL;
    return module;
}
