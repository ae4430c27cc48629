/* From the arguments of a call to its program, in one look-up.
 *
 * A key holds all that tells a call from others, but for the addresses of its buffers: collective, root, sizes and types
 * of arrays, algorithm, transport and parameters. Whatever is not a plain call on arrays, or is wrong, is left to Python,
 * which looks at it from the beginning, and says what is wrong.
 *
 * Between calls a program fills the caches with other data. So a call looks at few places of memory: at the fields of
 * arrays, not through their buffer protocol; at the addresses of texts, not at their letters. */

#include "_engine.h"
#include <string.h>
#include <time.h>

enum {
    MOST_KNOWN = 256, /* calls on a communicator */
    PLACES = 512,     /* for them: so many that a free one is near */
    MOST_WORDS = 24,  /* of a key */
    MOST_KINDS = 64,  /* of communicators that begin by themselves: as many as Python keeps */
    MOST_ENTRIES = 64 /* functions, and methods of drop-in communicators */
};

/* How NumPy's arrays begin (its PyArrayObject_fields); `setup_calls` looks whether they do. */
typedef struct {
    PyObject_HEAD
    char *data;
    int dimensions;
    Py_ssize_t *shape, *strides;
    PyObject *base, *type;
    int flags;
} Array;
enum { C_ORDER = 1, FORTRAN_ORDER = 2, ALIGNED = 0x100, WRITEABLE = 0x400 }; /* flags */

typedef struct {
    int64_t words[MOST_WORDS]; /* of an object its address */
    uint32_t objects;          /* which words are objects, a bit each */
    int length;
} Key;

/* Of a call whose blocks have datatypes of their own: what was passed, which must be as it was, and, for a program,
 * where its blocks lie together, and their sizes and places there. */
typedef struct {
    PyObject *given;    /* as Python gave it; what is below lies in there. NULL: of other calls */
    PyObject *parts[2]; /* what came with each array: see `is_as_it_was`; None in place */
    PyObject *owner;    /* a list with what owns the memory; empty once that is gone. NULL without a program */
    Move moves[2];
    const int64_t *rows;
} Typed;

/* How the MPI library's own collective is called where all but the places of buffers is the same each time. */
enum shape { EXCHANGE, SPREAD, COMBINE, ROOTED, COMBINE_AT }; /* as in direct.py */
typedef struct {
    void *function; /* NULL: mpi4py's method is called */
    int shape, is_large, root; /* is_large: of counts with 8 bytes */
    long long counts[2], types[2], operation;
} Direct;

/* What counts and displacements of an array count, in bytes: from one to the next, to the end of the first one, of data. */
typedef struct {
    int64_t extent, reach, size;
} Element;

/* A call, and what serves it: a program; mpi4py's method of communicators, which a function may stand for; or idle plans,
 * one of which Python starts (see `is_idle`). */
typedef struct {
    Key key;
    Typed typed;
    Direct direct;
    PyObject *target;
    PyObject *counter;          /* calls that the target still serves, and nanoseconds they took, in an array; or None */
    int64_t *left;              /* in there; NULL: it serves all */
    Element elements[2];        /* of send and recv */
    int64_t items[2], bytes[2]; /* of an element of the array, and of all of them */
    int buffers;                /* how many a method takes */
} Known;

typedef struct {
    PyObject_HEAD
    Known **places;   /* one is where the hash of its key leads to, or at the next place that was free */
    PyObject *failed; /* called with a program, its entry in the record, and what was raised in it */
    int is_open;      /* whether calls may be served here */
    int rank, size, count;
    int64_t *numbers; /* room for the sizes and places of blocks that the MPI library is to move */
    Py_ssize_t read[2]; /* blocks whose sizes and places are in there, of the call that was looked at last */
    long long calls;
    double limit;     /* seconds that a call may wait, 0: for ever; if not, calls are numbered and recorded */
    int64_t *number;
    PyObject *record; /* called with the entry of each */
} Routes;

enum option { ALGORITHM, TRANSPORT, ROOT, STREAM, OP, ORDER, COUNTS, OPTIONS };
static const char *const option_names[OPTIONS] = {"algorithm", "transport", "root", "stream", "op", "order", "recvcounts"};

static struct {
    PyTypeObject *comm, *array, *datatype; /* array: NULL as long as nobody has imported NumPy */
    PyTypeObject *last_type;          /* that was found to be one of communicators */
    Py_ssize_t offset;                /* of the handle in a communicator object */
    Py_ssize_t type_offset;           /* in a datatype */
    int64_t no_type;                  /* MPI.DATATYPE_NULL */
    PyObject *background, *observers; /* lists: calls go past here while there is something in them */
    PyObject *automatic, *native, *zero, *sum, *in_place; /* "auto"; "native"; 0; MPI.SUM; MPI.IN_PLACE */
    char *in_place_address;           /* MPI_IN_PLACE */
    PyObject *options[OPTIONS];       /* their names */
    PyObject *wide, *narrow;          /* NumPy's types of counts, of 8 and of 4 bytes */
    PyObject *kinds;                  /* of records, by address: (record, bytes of its `Kind`) */
    PyObject *routes;                 /* of each communicator, by handle: (routes, tally) */
    int key;                          /* of the attribute by which communicators begin */
    PyObject *beginnings;             /* (attribute, rank, size): (routes, tally), which is copied; empty: none begin */
    int64_t last_handle;
    Routes *last;    /* borrowed from ``routes`` */
    PyObject *tally; /* likewise: an array, as a `Known` has, for the calls whose own they do not say; or None */
} calls;

/* Python looks at the call, and says what is wrong: an exception is of no interest, unless it came from outside of the
 * call, such as Ctrl-C. 0, or -1 with that one. */
int let_pass(void)
{
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return PyErr_Occurred() ? -1 : 0;
}

static void look_up(int64_t handle)
{
    PyObject *number = PyLong_FromUnsignedLongLong((unsigned long long)handle);
    PyObject *pair = number ? PyDict_GetItemWithError(calls.routes, number) : NULL;
    calls.last = pair ? (Routes *)PyTuple_GetItem(pair, 0) : NULL;
    calls.tally = pair ? PyTuple_GetItem(pair, 1) : NULL;
    calls.last_handle = handle;
    Py_XDECREF(number);
}

static int set_routes(PyObject *handle, PyObject *routes, PyObject *tally)
{
    PyObject *pair = PyTuple_Pack(2, routes, tally);
    int outcome = pair ? PyDict_SetItem(calls.routes, handle, pair) : -1;
    Py_XDECREF(pair);
    calls.last = NULL;
    return outcome;
}

int find_handle(PyObject *comm, int64_t *handle)
{
    if (!PyType_IsSubtype(Py_TYPE(comm), calls.comm))
        return PyErr_Format(PyExc_TypeError, "not a communicator: %R", comm), -1;
    *handle = get_handle((char *)comm + calls.offset);
    return 0;
}

void unregister(PyObject *handle)
{
    calls.last = NULL;
    if (calls.routes && handle && PyDict_GetItemWithError(calls.routes, handle))
        PyDict_DelItem(calls.routes, handle);
}

/* Let calls of a communicator on which nothing is registered be counted, as Python does on those like it: its attribute
 * says on what its ranks have agreed. */
static void begin_counting(int64_t handle)
{
    intptr_t comm = (intptr_t)handle, agreed;
    int rank = 0, size = 0;
    if (!PyDict_Size(calls.beginnings) || !find_attribute(handle, calls.key, 1, &agreed) ||
        ((get_number)mpi_rank)(comm, &rank) || ((get_number)mpi_size)(comm, &size))
        return;
    PyObject *kind = Py_BuildValue("(nii)", (Py_ssize_t)agreed, rank, size);
    PyObject *pair = kind ? PyDict_GetItemWithError(calls.beginnings, kind) : NULL;
    Py_XINCREF(pair);
    PyObject *tally = pair ? PySequence_Repeat(PyTuple_GetItem(pair, 1), 1) : NULL; /* a copy */
    PyObject *number = PyLong_FromUnsignedLongLong((unsigned long long)handle);
    if (tally && number && set_routes(number, PyTuple_GetItem(pair, 0), tally) == 0)
        look_up(handle);
    Py_XDECREF(number);
    Py_XDECREF(tally);
    Py_XDECREF(pair);
    Py_XDECREF(kind);
    let_pass();
}

/* The routes of a communicator that serves calls now; NULL if there are none. */
static Routes *find_routes(PyObject *comm)
{
    if (Py_TYPE(comm) != calls.last_type) {
        if (!calls.comm || !PyType_IsSubtype(Py_TYPE(comm), calls.comm))
            return NULL;
        Py_XDECREF((PyObject *)calls.last_type);
        calls.last_type = Py_TYPE(comm);
        Py_INCREF((PyObject *)calls.last_type);
    }
    int64_t handle = get_handle((char *)comm + calls.offset);
    if (!calls.last || handle != calls.last_handle)
        look_up(handle);
    if (!calls.last)
        begin_counting(handle);
    return calls.last && calls.last->is_open ? calls.last : NULL;
}

/* ---- Keys. Functions return 0, or -1 for what Python is to look at (perhaps with an exception, of no interest). */

/* What a record says of blocks and buffers. */
typedef struct {
    int is_even;    /* whether blocks have one size */
    int by_total;   /* whether "auto" goes by the sum of sizes, which differ */
    int is_typed;   /* whether each block has a datatype of its own */
    int of_root;    /* which buffer only the root has, 0 or 1; -1: none */
    int root_knows; /* whether blocks have any sizes, all of which only the root knows */
    int is_counted; /* whether sizes are arguments of their own, of the parts of one vector */
    int begins;     /* whether calls return before they are done */
    int buffers;    /* how many a call has */
} Kind;

/* The arguments of a call, and what tells it from others. */
typedef struct {
    PyObject *comm;
    PyObject *given[2];     /* send and recv; None for what is not taken: send where there is one buffer */
    PyObject *blocks[2];    /* which blocks they have, if they come with that */
    PyObject *displacements[2]; /* of these, if they come after their counts */
    PyObject *types[2];     /* of blocks of any sizes, if they come with a datatype */
    /* Owned until `end_call`, since a list that they came in may change while the call waits: */
    Array *arrays[2];       /* NULL for None, and for buffers of other kinds, such as a bytearray */
    Py_buffer views[2];     /* of these */
    char *data[2];          /* where they lie; NULL for None */
    PyObject *options[OPTIONS];
    Kind kind;
    int rank;
    PyObject *tally; /* of the communicator, once it is served */
    PyObject **server; /* where to say what served it: the name of a plan, or "native"; NULL: nowhere */
    /* Whoever began the call owns these: */
    PyObject *request; /* what mpi4py's method has returned, if that is not None */
    PyObject *idle;    /* plans, one of which is to be started */
    Key key;
} Call;

static int add_number(Key *key, int64_t number)
{
    if (key->length == MOST_WORDS)
        return -1;
    key->words[key->length++] = number;
    return 0;
}

static int add_object(Key *key, const void *object)
{
    key->objects |= 1u << key->length;
    return add_number(key, (int64_t)(uintptr_t)object);
}

static PyObject *object_in(const Key *key, int index) /* NULL if that is none */
{
    return key->objects >> index & 1 ? (PyObject *)(uintptr_t)key->words[index] : NULL;
}

/* Equal texts are one object once they are interned, as most are from the beginning. */
static int add_text(Key *key, PyObject *text)
{
    if (text == calls.automatic)
        return add_object(key, text);
    if (!PyUnicode_CheckExact(text))
        return -1;
    Py_INCREF(text);
    PyUnicode_InternInPlace(&text);
    Py_DECREF(text); /* others own it as long as the key is looked for */
    return add_object(key, text);
}

static int add_whole_number(Key *key, PyObject *number)
{
    int overflow = 0;
    if (number == calls.zero)
        return add_number(key, 0);
    return add_number(key, PyLong_AsLongLongAndOverflow(number, &overflow)) < 0 || overflow ? -1 : 0;
}

/* Those of the options that a function has; all other names are parameters of the algorithm. Values that are no whole
 * numbers or texts (True and 2.0 equal numbers) are for Python to refuse. */
static int read_options(Call *call, unsigned options, PyObject *const *values, PyObject *names)
{
    Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t each = 0; each < count; each++) {
        PyObject *name = PyTuple_GetItem(names, each), *value = values[each];
        int option = 0;
        while (option < OPTIONS && name != calls.options[option])
            option++;
        if (option < OPTIONS && options >> option & 1)
            call->options[option] = value;
        else if (add_text(&call->key, name) < 0 ||
                 (PyLong_CheckExact(value) ? add_whole_number : add_text)(&call->key, value) < 0)
            return -1;
    }
    return 0;
}

static Py_ssize_t length_of(PyObject *list) /* or of a tuple; -1 for anything else */
{
    return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_CheckExact(list) ? PyTuple_Size(list) : -1;
}

static PyObject *item_of(PyObject *list, Py_ssize_t index)
{
    return PyList_CheckExact(list) ? PyList_GetItem(list, index) : PyTuple_GetItem(list, index);
}

/* Of a list or a tuple of two, an array and what says which blocks it has; of an array alone, all of it (NULL). */
static PyObject *split(PyObject *given, PyObject **blocks)
{
    int is_pair = Py_TYPE(given) != calls.array && length_of(given) == 2;
    *blocks = is_pair ? item_of(given, 1) : NULL;
    return is_pair ? item_of(given, 0) : given;
}

/* The same of a buffer of blocks of any sizes, which may come with a datatype besides: [array, datatype], [array, counts,
 * datatype], [array, counts, displacements, datatype]. */
static PyObject *split_typed(Call *call, int end)
{
    PyObject *given = call->given[end], **blocks = &call->blocks[end];
    Py_ssize_t count = Py_TYPE(given) == calls.array ? -1 : length_of(given);
    PyObject *last = count > 1 && count < 5 ? item_of(given, count - 1) : NULL;
    if (!last || Py_TYPE(last) != calls.datatype)
        return split(given, blocks);
    call->types[end] = last;
    *blocks = count > 2 ? item_of(given, 1) : NULL;
    call->displacements[end] = count > 3 ? item_of(given, 2) : NULL;
    return item_of(given, 0);
}

/* Of equal blocks, a buffer that may come with a count, a datatype (an object of its own, or a name) or both:
 * [buffer, datatype], [buffer, count], [buffer, count, datatype]. NULL if it is nothing of the kind. */
static PyObject *add_numbers(Call *call, PyObject *given)
{
    Py_ssize_t count = length_of(given);
    if (count < 0)
        return given;
    if (count < 2 || count > 3 || add_number(&call->key, -4 - count) < 0)
        return NULL;
    for (Py_ssize_t each = 1; each < count; each++) {
        PyObject *item = item_of(given, each);
        int added = PyLong_CheckExact(item)            ? add_whole_number(&call->key, item)
                    : PyUnicode_CheckExact(item)       ? add_text(&call->key, item)
                    : Py_TYPE(item) == calls.datatype ? add_object(&call->key, item)
                                                       : -1;
        if (added < 0)
            return NULL;
    }
    return item_of(given, 0);
}

/* Memory that is no array of NumPy's, by the buffer protocol: of a bytearray, mmap, array.array. */
static int add_view(Call *call, int end, PyObject *buffer)
{
    Py_buffer *view = &call->views[end];
    if (!PyObject_CheckBuffer(buffer) ||
        PyObject_GetBuffer(buffer, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (end ? PyBUF_WRITABLE : 0)) < 0)
        return -1;
    const char *format = view->format ? view->format : "B"; /* one letter, or Python looks at it */
    call->data[end] = view->buf;
    if (!format[0] || format[1] || add_number(&call->key, -8) < 0 || add_number(&call->key, format[0]) < 0)
        return -1;
    return add_number(&call->key, view->len);
}

static void set_array(Call *call, int end, Array *array)
{
    Py_XINCREF((PyObject *)array);
    Py_XDECREF((PyObject *)call->arrays[end]);
    call->arrays[end] = array;
    call->data[end] = array ? array->data : NULL;
}

static void end_call(Call *call)
{
    for (int end = 0; end < 2; end++) {
        set_array(call, end, NULL);
        if (call->views[end].obj)
            PyBuffer_Release(&call->views[end]);
    }
}

/* MPI may still use the memory of an interrupted call: whatever holds it is there for good. */
static void abandon(Call *call)
{
    for (int end = 0; end < 2; end++) {
        call->arrays[end] = NULL;
        call->views[end].obj = NULL;
    }
}

static int64_t elements(const Array *array)
{
    int64_t count = 1;
    for (int each = 0; each < array->dimensions; each++)
        count *= array->shape[each];
    return count;
}

/* An array with datatypes, perhaps after counts and displacements: by where it lies, and by the very objects that came
 * with it, whose contents are compared later. */
static int add_typed(Call *call, int end)
{
    PyObject *given = call->given[end];
    Py_ssize_t count = length_of(given);
    if (!calls.array || count < 2 || count > 4 || !PyType_IsSubtype(Py_TYPE(item_of(given, 0)), calls.array))
        return -1;
    Array *array = (Array *)item_of(given, 0);
    if (!(array->flags & (C_ORDER | FORTRAN_ORDER)) || (end && !(array->flags & WRITEABLE)))
        return -1;
    set_array(call, end, array);
    if (add_number(&call->key, -9) < 0 || add_number(&call->key, (int64_t)(uintptr_t)array->data) < 0 ||
        add_number(&call->key, elements(array)) < 0 || add_object(&call->key, array->type) < 0)
        return -1;
    for (Py_ssize_t each = 1; each < count; each++)
        if (add_object(&call->key, item_of(given, each)) < 0)
            return -1;
    return 0;
}

/* Of blocks of any sizes the key says only that they are, as counts of many or of one: sizes come with each start. None:
 * there are fewer than two buffers, or only the root has two, whatever other ranks give. */
static int add_buffer(Call *call, int end)
{
    const Kind *kind = &call->kind;
    if (call->given[end] == Py_None || (end == kind->of_root && PyLong_AsLong(call->options[ROOT]) != call->rank))
        return add_number(&call->key, -3);
    if ((end == 0 || kind->of_root == 0) && call->given[end] == calls.in_place)
        return add_number(&call->key, -4);
    if (kind->is_typed)
        return add_typed(call, end);
    PyObject *buffer = kind->is_even ? add_numbers(call, call->given[end]) : split_typed(call, end);
    if (!buffer || Py_TYPE(buffer) != calls.array)
        return buffer && kind->is_even ? add_view(call, end, buffer) : -1;
    Array *array = (Array *)buffer;
    if (!(array->flags & (C_ORDER | FORTRAN_ORDER)) || !(array->flags & ALIGNED) || (end && !(array->flags & WRITEABLE)))
        return -1;
    set_array(call, end, array);
    PyObject *blocks = call->blocks[end];
    int64_t size = blocks                               ? (PyLong_CheckExact(blocks) ? -10 : -2)
                   : call->blocks[1] || kind->root_knows ? -1
                                                         : elements(array);
    if (add_number(&call->key, size) < 0 || add_object(&call->key, array->type) < 0)
        return -1;
    return call->types[end] ? add_object(&call->key, call->types[end]) : 0;
}

/* The sum of whole numbers in a list, or in an array of the usual types; -1 for anything else. */
static int64_t total_of(PyObject *counts)
{
    int64_t total = 0;
    if (PyList_CheckExact(counts)) {
        for (Py_ssize_t each = 0; each < PyList_Size(counts); each++) {
            PyObject *number = PyList_GetItem(counts, each);
            if (!PyLong_CheckExact(number))
                return -1;
            total += PyLong_AsLongLong(number);
        }
        return PyErr_Occurred() ? -1 : total;
    }
    const Array *array = (const Array *)counts;
    if (Py_TYPE(counts) != calls.array || array->dimensions != 1 || !(array->flags & C_ORDER) ||
        !(array->flags & ALIGNED) || (array->type != calls.wide && array->type != calls.narrow))
        return -1;
    for (Py_ssize_t each = 0; each < array->shape[0]; each++)
        total += array->type == calls.wide ? ((int64_t *)array->data)[each] : ((int32_t *)array->data)[each];
    return total;
}

/* All elements received, where they are what the choice goes by: ranks may spell a call in ways of which only some come
 * here, and must count it as the same one. */
static int add_total(Call *call)
{
    PyObject *counts = call->blocks[1];
    if (!call->kind.by_total || !counts || call->options[ALGORITHM] != calls.automatic)
        return 0;
    if (PyTuple_CheckExact(counts))
        counts = PyTuple_Size(counts) == 2 ? PyTuple_GetItem(counts, 0) : NULL;
    int64_t total = counts ? total_of(counts) : -1;
    return total < 0 ? -1 : add_number(&call->key, total);
}

static void begin_call(Call *call, PyObject *comm, PyObject *send, PyObject *recv, Kind kind)
{
    call->comm = comm;
    call->kind = kind;
    call->given[0] = send;
    call->given[1] = recv;
    call->arrays[0] = call->arrays[1] = NULL;
    call->blocks[0] = call->blocks[1] = NULL;
    call->displacements[0] = call->displacements[1] = NULL;
    call->types[0] = call->types[1] = NULL;
    call->views[0].obj = call->views[1].obj = NULL;
    call->data[0] = call->data[1] = NULL;
    call->options[ALGORITHM] = call->options[TRANSPORT] = calls.automatic;
    call->options[ROOT] = calls.zero;
    call->options[STREAM] = call->options[OP] = call->options[ORDER] = call->options[COUNTS] = Py_None;
    call->rank = 0;
    call->server = NULL;
    call->request = call->idle = NULL;
    call->key.objects = 0;
    call->key.length = 0;
}

/* Where "auto" is the MPI library's own for blocks of any sizes, calls on memory of the host are all alike. */
static int describe_any(Call *call, PyObject *collective)
{
    call->key.length = 0;
    call->key.objects = 0;
    end_call(call);
    call->blocks[0] = call->blocks[1] = NULL;
    call->displacements[0] = call->displacements[1] = NULL;
    call->types[0] = call->types[1] = NULL;
    for (int end = 0; end < 2; end++) {
        PyObject *given = call->given[end];
        if (given == calls.in_place || given == Py_None || PyObject_CheckBuffer(given))
            continue;
        if (length_of(given) < 1 || !PyObject_CheckBuffer(item_of(given, 0)))
            return -1;
    }
    return add_object(&call->key, collective);
}

/* ``options`` are those that may be among the names. */
static int describe(Call *call, PyObject *collective, unsigned options, PyObject *const *values, PyObject *names)
{
    PyObject *const *given = call->options;
    Key *key = &call->key;
    key->length = 0;
    key->objects = 0;
    if (read_options(call, options, values, names) < 0 || !PyLong_CheckExact(given[ROOT]) || add_buffer(call, 1) < 0 ||
        add_buffer(call, 0) < 0 || add_total(call) < 0)
        return -1;
    if (call->given[0] == call->given[1] && call->given[0] != Py_None)
        return -1; /* one buffer for both */
    if (given[STREAM] != Py_None || add_whole_number(key, given[ROOT]) < 0 || add_text(key, given[ALGORITHM]) < 0 ||
        add_text(key, given[TRANSPORT]) < 0)
        return -1;
    if ((given[OP] != Py_None && add_object(key, given[OP]) < 0) || (given[ORDER] != Py_None && add_text(key, given[ORDER]) < 0))
        return -1;
    return add_object(key, collective);
}

/* Whole numbers of a list, or of an array of the usual types. */
static int read_numbers(PyObject *from, int64_t *numbers, Py_ssize_t count)
{
    if (PyList_CheckExact(from)) {
        int good = PyList_Size(from) == count;
        for (Py_ssize_t each = 0; each < count && good; each++) {
            PyObject *number = PyList_GetItem(from, each);
            good = PyLong_CheckExact(number);
            numbers[each] = good ? PyLong_AsLongLong(number) : -1; /* too large ones: -1, which is refused later */
        }
        return good ? 0 : -1;
    }
    const Array *array = (const Array *)from;
    if (Py_TYPE(from) != calls.array || array->dimensions != 1 || array->shape[0] != count ||
        (array->flags & (C_ORDER | ALIGNED)) != (C_ORDER | ALIGNED) ||
        (array->type != calls.wide && array->type != calls.narrow))
        return -1;
    for (Py_ssize_t each = 0; each < count; each++)
        numbers[each] = array->type == calls.wide ? ((int64_t *)array->data)[each] : ((int32_t *)array->data)[each];
    return 0;
}

/* Sizes and places in bytes, from an array's counts or (counts, displacements); of one block that may be a number, or all
 * of the array. */
static int read_blocks(const Call *call, int end, const Known *known, Py_ssize_t count, int64_t *sizes, int64_t *places)
{
    PyObject *displacements = call->displacements[end], *counts = call->blocks[end];
    const Element *element = &known->elements[end];
    int64_t item = element->extent, bytes = elements(call->arrays[end]) * known->items[end];
    int64_t next = 0, most = bytes < element->reach ? 0 : (bytes - element->reach) / item + 1;
    if (count == 1 && !displacements && (!counts || PyLong_CheckExact(counts))) {
        int64_t size = counts ? PyLong_AsLongLong(counts) : most; /* a number that is too large: -1 */
        sizes[0] = size * item;
        places[0] = 0;
        return size < 0 || size > most || size * item > INT32_MAX ? -1 : 0;
    }
    if (counts && PyTuple_CheckExact(counts))
        counts = PyTuple_Size(counts) == 2 && !displacements ? split(counts, &displacements) : NULL;
    if (!counts || read_numbers(counts, sizes, count) < 0)
        return -1;
    if (displacements && read_numbers(displacements, places, count) < 0)
        return -1;
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

/* ---- What is known of a communicator */

static int are_equal(const Key *one, const Key *other)
{
    int equal = one->length == other->length && one->objects == other->objects;
    for (int each = 0; equal && each < one->length; each++)
        equal = one->words[each] == other->words[each];
    return equal;
}

/* Where it is, or would be. */
static Known **place_of(const Routes *routes, const Key *key)
{
    uint64_t hash = 0;
    for (int each = 0; each < key->length; each++) {
        hash = (hash ^ (uint64_t)key->words[each]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    for (;; hash++) {
        const Known *known = routes->places[hash % PLACES];
        if (!known || are_equal(key, &known->key))
            return &routes->places[hash % PLACES];
    }
}

static void forget(Known *known)
{
    for (int each = 0; known && each < known->key.length; each++)
        Py_XDECREF(object_in(&known->key, each));
    if (known) {
        Py_DECREF(known->target);
        Py_DECREF(known->counter);
        Py_XDECREF(known->typed.given);
    }
    PyMem_Free(known);
}

static void forget_all(Routes *routes)
{
    routes->count = 0; /* first, as below: what is freed may come here */
    for (int place = 0; routes->places && place < PLACES; place++) {
        Known *known = routes->places[place];
        routes->places[place] = NULL;
        forget(known);
    }
}

/* What an object says, such as a type the bytes of an element; -1 with an exception. */
static int64_t number_of(PyObject *object, const char *name)
{
    PyObject *answer = PyObject_GetAttrString(object, name);
    int64_t number = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return number;
}

/* Whether a record says so; -1 with an exception. */
static int is_so(PyObject *collective, const char *name)
{
    PyObject *answer = PyObject_GetAttrString(collective, name);
    int outcome = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return outcome;
}

/* See `Kind`; -1 with an exception. */
static int ask_kind(PyObject *collective, Kind *kind)
{
    int is_private = is_so(collective, "is_private");
    if (is_private < 0 || (kind->is_even = is_so(collective, "is_even")) < 0 ||
        (kind->is_typed = is_so(collective, "typed")) < 0 || (kind->is_counted = is_so(collective, "is_counted")) < 0 ||
        (kind->begins = is_so(collective, "begins")) < 0)
        return -1;
    kind->of_root = (int)number_of(collective, "of_root");
    if (PyErr_Occurred())
        return -1;
    kind->buffers = (int)number_of(collective, "buffers");
    kind->by_total = !kind->is_even && !is_private && !kind->is_typed;
    kind->root_knows = !kind->is_even && kind->of_root >= 0;
    return PyErr_Occurred() ? -1 : 0;
}

/* The same, which a record is asked once: it runs code of Python's to answer, in which anything may happen. */
static int read_kind(PyObject *collective, Kind *kind)
{
    PyObject *at = PyLong_FromVoidPtr(collective);
    PyObject *known = at ? PyDict_GetItemWithError(calls.kinds, at) : NULL;
    int good = at && !PyErr_Occurred();
    if (good && known)
        memcpy(kind, PyBytes_AsString(PyTuple_GetItem(known, 1)), sizeof *kind);
    else if (good && (good = ask_kind(collective, kind) == 0)) {
        known = Py_BuildValue("(Oy#)", collective, (char *)kind, (Py_ssize_t)sizeof *kind);
        good = known && PyDict_SetItem(calls.kinds, at, known) == 0;
        Py_XDECREF(known);
    }
    Py_XDECREF(at);
    return good ? 0 : -1;
}

/* What Python gives of a copy: (words, address, packed, nbytes); None where nothing is copied. */
static int read_move(PyObject *given, Move *move)
{
    Py_buffer words;
    unsigned long long apart, packed;
    if (given == Py_None)
        return 0;
    if (!PyArg_ParseTuple(given, "y*KKn", &words, &apart, &packed, &move->nbytes))
        return -1;
    move->words = words.buf; /* it lies there as long as what was given */
    move->end = move->words + words.len / (Py_ssize_t)sizeof *move->words;
    move->apart = (char *)(uintptr_t)apart;
    move->packed = (char *)(uintptr_t)packed;
    PyBuffer_Release(&words);
    return 0;
}

/* (what came with each array, owner, copies before and after a start, bytes of sizes and places); the last four are
 * None without a program. */
static int read_typed(PyObject *given, Typed *typed)
{
    PyObject *owner, *before, *after, *rows;
    Py_buffer view;
    if (!PyArg_ParseTuple(given, "(OO)OOOO", &typed->parts[0], &typed->parts[1], &owner, &before, &after, &rows) ||
        read_move(before, &typed->moves[0]) < 0 || read_move(after, &typed->moves[1]) < 0)
        return -1;
    if (rows != Py_None) {
        if (PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE) < 0)
            return -1;
        typed->rows = view.buf;
        PyBuffer_Release(&view);
    }
    typed->owner = owner == Py_None ? NULL : owner;
    typed->given = given;
    Py_INCREF(given);
    return 0;
}

/* The numbers in a counter: calls that are left, and nanoseconds. They lie there as long as it lives. NULL for None, or
 * with an exception. */
static int64_t *numbers_in(PyObject *counter)
{
    Py_buffer view = {.buf = NULL};
    if (counter == Py_None || PyObject_GetBuffer(counter, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    PyBuffer_Release(&view);
    return view.buf;
}

/* What Python gives of it: (name, shape, root, counts and datatypes of send and recv, operation). A function that the MPI
 * library lacks is none. -1 where there are more elements than it can be told of, or with an exception. */
static int read_direct(PyObject *given, Direct *direct)
{
    const char *name;
    if (!PyArg_ParseTuple(given, "siiLLLLL", &name, &direct->shape, &direct->root, &direct->counts[0], &direct->types[0],
                          &direct->counts[1], &direct->types[1], &direct->operation))
        return -1;
    direct->function = find_collective(name, &direct->is_large);
    long long most = direct->is_large ? INT64_MAX : INT32_MAX;
    return direct->counts[0] > most || direct->counts[1] > most ? -1 : 0;
}

/* Of an array, or of the datatype that comes with it; -1 where data begin before their place, or the extent is not
 * positive, or with an exception. */
static int read_element(PyObject *datatype, int64_t item, Element *element)
{
    Element of_array = {item, item, item};
    *element = of_array;
    if (!datatype)
        return 0;
    int64_t begin = number_of(datatype, "true_lb"), length = number_of(datatype, "true_extent");
    element->extent = number_of(datatype, "extent");
    element->size = number_of(datatype, "size");
    element->reach = begin + length;
    return begin < 0 || length < 0 || element->extent <= 0 || PyErr_Occurred() ? -1 : 0;
}

/* Let ``target`` serve such calls, as long as the ``counter`` allows; 1, or -1 if it cannot. ``typed``: see
 * `read_typed`; ``direct``: see `read_direct`; None for other calls. */
static int keep(Routes *routes, const Call *call, PyObject *target, PyObject *counter, PyObject *typed,
                PyObject *direct)
{
    Known *known = PyMem_Calloc(1, sizeof(Known));
    if (!known)
        return PyErr_NoMemory(), -1;
    known->key = call->key;
    known->target = target;
    known->counter = counter;
    Py_INCREF(target);
    Py_INCREF(counter);
    for (int each = 0; each < call->key.length; each++)
        Py_XINCREF(object_in(&call->key, each));
    known->left = numbers_in(counter);
    int good = counter == Py_None || known->left;
    good = good && (typed == Py_None || read_typed(typed, &known->typed) == 0);
    good = good && (direct == Py_None || read_direct(direct, &known->direct) == 0);
    for (int end = 0; end < 2 && good; end++) {
        known->items[end] = call->arrays[end] ? number_of(call->arrays[end]->type, "itemsize") : 1;
        known->bytes[end] = call->arrays[end]      ? known->items[end] * elements(call->arrays[end])
                            : call->views[end].obj ? call->views[end].len
                                                   : 0;
        good = known->items[end] > 0 && read_element(call->types[end], known->items[end], &known->elements[end]) == 0;
    }
    known->buffers = call->kind.buffers;
    if (!good)
        return forget(known), -1;
    if (routes->count >= MOST_KNOWN)
        forget_all(routes);
    Known **place = place_of(routes, &known->key), *before = *place;
    *place = known;
    routes->count += !before;
    forget(before);
    return 1;
}

/* ---- Serving. Functions return 1 if a call was served, 0 if Python is to serve it, -1 with an exception. */

static double wall_clock(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int64_t nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Where calls have a deadline: the call's entry in the record (see watch.py); None where they have not. */
static PyObject *begin_record(Routes *routes, const Program *program, double began)
{
    if (!routes->limit)
        return Py_INCREF(Py_None), Py_None;
    PyObject *name = program->name ? program->name : Py_None;
    PyObject *entry = Py_BuildValue("[LOdO]", (long long)++*routes->number, name, began, Py_None);
    PyObject *done = entry ? PyObject_CallFunctionObjArgs(routes->record, entry, NULL) : NULL;
    if (!done)
        Py_CLEAR(entry);
    Py_XDECREF(done);
    return entry;
}

/* An exception was raised in a program: the session is told, and may say more. */
static void tell(Routes *routes, Program *program, PyObject *entry)
{
    PyObject *kind, *error, *trace;
    routes->is_open = 0;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject *told = PyObject_CallFunctionObjArgs(routes->failed, (PyObject *)program, entry, error, NULL);
    if (told)
        PyErr_Restore(kind, error, trace);
    else {
        Py_XDECREF(kind);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(told);
}

/* The caller owns routes and program: other threads may run while this one waits. */
static int run(Routes *routes, Program *program, Call *call)
{
    double began = routes->limit ? wall_clock() : 0;
    PyObject *entry = begin_record(routes, program, began);
    if (!entry)
        return -1;
    program->used = ++routes->calls;
    program->limit = routes->limit;
    if (program->window)
        program->window[1] = routes->calls;
    program->bases[0] = (int64_t)(uintptr_t)call->data[0];
    program->bases[1] = (int64_t)(uintptr_t)call->data[1];
    int outcome = begin_program(program) < 0 ? -1 : advance_program(program, 1);
    if (outcome < 0)
        tell(routes, program, entry);
    else if (entry != Py_None)
        PyList_SetItem(entry, 3, PyFloat_FromDouble(wall_clock() - began));
    Py_DECREF(entry);
    if (outcome < 0)
        abandon(call);
    return outcome;
}

static int run_native(PyObject *method, Call *call, int buffers)
{
    PyObject *more[] = {NULL, NULL, NULL, NULL, NULL};
    int count = 0;
    for (int end = 2 - buffers; end < 2; end++)
        more[count++] = call->given[end];
    if (call->kind.is_counted)
        more[count++] = call->options[COUNTS];
    if (call->options[OP] != Py_None)
        more[count++] = call->options[OP];
    if (call->options[ROOT] != calls.zero) /* which is not given where there is none */
        more[count++] = call->options[ROOT];
    PyObject *done = PyObject_CallFunctionObjArgs(method, call->comm, more[0], more[1], more[2], more[3], NULL);
    if (done && done != Py_None)
        call->request = done;
    else
        Py_XDECREF(done);
    return done ? 1 : -1;
}

/* MPI's functions, with counts of a type. */
#define CALL(count)                                                                                                    \
    static int call_##count(const Direct *this, const void *send, void *recv, intptr_t comm)                           \
    {                                                                                                                  \
        count out = (count)this->counts[0], in = (count)this->counts[1];                                               \
        intptr_t kind = (intptr_t)this->types[0], other = (intptr_t)this->types[1], op = (intptr_t)this->operation;    \
        int root = this->root;                                                                                         \
        typedef int (*exchange)(const void *, count, intptr_t, void *, count, intptr_t, intptr_t);                     \
        typedef int (*spread)(void *, count, intptr_t, int, intptr_t);                                                 \
        typedef int (*combine)(const void *, void *, count, intptr_t, intptr_t, intptr_t);                             \
        typedef int (*rooted)(const void *, count, intptr_t, void *, count, intptr_t, int, intptr_t);                  \
        typedef int (*combine_at)(const void *, void *, count, intptr_t, intptr_t, int, intptr_t);                     \
        switch (this->shape) {                                                                                         \
        case EXCHANGE:                                                                                                 \
            return ((exchange)this->function)(send, out, kind, recv, in, other, comm);                                 \
        case SPREAD:                                                                                                   \
            return ((spread)this->function)(recv, in, other, root, comm);                                              \
        case COMBINE:                                                                                                  \
            return ((combine)this->function)(send, recv, in, other, op, comm);                                         \
        case ROOTED:                                                                                                   \
            return ((rooted)this->function)(send, out, kind, recv, in, other, root, comm);                             \
        default:                                                                                                       \
            return ((combine_at)this->function)(send, recv, in, other, op, root, comm);                                \
        }                                                                                                              \
    }
typedef int few;
typedef int64_t many;
CALL(few)
CALL(many)

static int run_direct(const Direct *known, const Call *call)
{
    Direct direct = *known; /* Python may forget the call while it runs */
    intptr_t comm = (intptr_t)get_handle((char *)call->comm + calls.offset);
    const char *send = call->given[0] == calls.in_place ? calls.in_place_address : call->data[0];
    char *recv = call->given[1] == calls.in_place ? calls.in_place_address : call->data[1];
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = (direct.is_large ? call_many : call_few)(&direct, send, recv, comm);
    Py_END_ALLOW_THREADS
    return code ? failed(code) : 1;
}

/* Whether sizes come with the call: of many blocks, or, where the root knows all, of one. */
static int is_by_block(const Call *call) { return call->blocks[1] || call->kind.is_typed || call->kind.root_knows; }

/* The sizes and places of this call's blocks, for the program, if there is one. Whether they are sound: a rank's block
 * for itself is as long at both ends, where it has both. */
static int have_blocks(Routes *routes, const Known *known, const Program *program, const Call *call)
{
    int64_t own[2] = {-1, -1};
    for (int end = 0; end < 2; end++) {
        PyObject *counts = call->blocks[end];
        if (!call->arrays[end]) { /* what only the root has; or in place: the MPI library knows where */
            if (program && program->blocks[end])
                return 0;
            continue;
        }
        Py_ssize_t count = program ? program->blocks[end] : counts && !PyLong_CheckExact(counts) ? routes->size : 1;
        int64_t *numbers = routes->numbers + 2 * end * routes->size;
        int64_t *places = program ? program->tables[end].places : numbers + routes->size;
        int64_t *sizes = program ? program->tables[end].sizes : numbers;
        if (read_blocks(call, end, known, count, sizes, places) < 0)
            return 0;
        const Element *element = &known->elements[end];
        own[end] = sizes[count == 1 ? 0 : routes->rank] / element->extent * element->size;
        routes->read[end] = count;
    }
    return own[0] < 0 || own[1] < 0 || own[0] == own[1];
}

/* Whether the parts of a vector make it up, of which this rank gets one. */
static int have_parts(const Routes *routes, const Call *call)
{
    const Array *whole = call->arrays[0], *part = call->arrays[1];
    int64_t total = 0, *sizes = routes->numbers;
    if (!whole || !part || whole->type != part->type || read_numbers(call->options[COUNTS], sizes, routes->size) < 0)
        return 0;
    for (int each = 0; each < routes->size; each++) {
        if (sizes[each] < 0 || sizes[each] > INT32_MAX)
            return 0;
        total += sizes[each];
    }
    return total == elements(whole) && sizes[routes->rank] == elements(part);
}

/* Whether what came with an array is as it was: the same objects in lists, the same bytes in an array of numbers; no
 * datatype among them has been freed. */
static int is_as_it_was(PyObject *part, PyObject *was)
{
    if (PyBytes_CheckExact(was)) {
        const Array *array = (const Array *)part;
        return Py_TYPE(part) == calls.array && array->dimensions == 1 && array->flags & C_ORDER &&
               array->shape[0] * array->strides[0] == PyBytes_Size(was) &&
               memcmp(array->data, PyBytes_AsString(was), (size_t)PyBytes_Size(was)) == 0;
    }
    if (!PyTuple_CheckExact(was))
        return part == was &&
               (Py_TYPE(part) != calls.datatype || get_handle((char *)part + calls.type_offset) != calls.no_type);
    int same = length_of(part) == PyTuple_Size(was);
    for (Py_ssize_t each = 0; same && each < PyTuple_Size(was); each++)
        same = is_as_it_was(item_of(part, each), PyTuple_GetItem(was, each));
    return same;
}

static int are_as_they_were(const Typed *typed, const Call *call)
{
    int same = !typed->owner || PyList_Size(typed->owner) > 0;
    for (int end = 0; same && end < 2; end++)
        for (Py_ssize_t each = 0; same && typed->parts[end] != Py_None && each < PyTuple_Size(typed->parts[end]); each++)
            same = is_as_it_was(item_of(call->given[end], each + 1), PyTuple_GetItem(typed->parts[end], each));
    return same;
}

/* Blocks with datatypes of their own: together to where the program works on them, and from there. */
static int run_typed(Routes *routes, Program *program, Call *call, const Typed *known)
{
    Typed typed = *known; /* Python may forget the call while it runs */
    PyObject *owner = PyList_GetItem(typed.owner, 0);
    Py_INCREF(typed.given);
    Py_INCREF(owner);
    const int64_t *row = typed.rows;
    for (int part = 0; part < 4; part++) { /* sizes of both, places of both */
        Table *table = &program->tables[part & 1];
        size_t count = (size_t)program->blocks[part & 1];
        memcpy(part < 2 ? table->sizes : table->places, row, count * sizeof *row);
        row += count;
    }
    for (int end = 0; end < 2; end++)
        call->data[end] = typed.moves[end].packed;
    move_blocks(&typed.moves[0], 1);
    int outcome = run(routes, program, call);
    if (outcome > 0)
        move_blocks(&typed.moves[1], 0);
    Py_DECREF(owner);
    Py_DECREF(typed.given);
    return outcome;
}

/* Whether it is (what Python is to start one of them with, a list of idle plans). */
static int is_idle(PyObject *target) { return PyTuple_CheckExact(target); }

static int run_known(Routes *routes, const Known *known, Call *call)
{
    if (known->direct.function)
        return run_direct(&known->direct, call);
    if (is_idle(known->target))
        return Py_INCREF(call->idle = PyTuple_GetItem(known->target, 0)), 1;
    PyObject *target = known->target;
    Py_INCREF(target); /* Python may forget the call while it runs */
    Program *program = (Program *)target;
    int outcome = Py_TYPE(target) != program_type ? run_native(target, call, known->buffers)
                  : known->typed.given            ? run_typed(routes, program, call, &known->typed)
                                                  : run(routes, program, call);
    Py_DECREF(target);
    return outcome;
}

static int serve(Routes *routes, Call *call)
{
    const Known *known = *place_of(routes, &call->key);
    Program *program = known && Py_TYPE(known->target) == program_type ? (Program *)known->target : NULL;
    int by_block = is_by_block(call);
    PyObject *counter = known && !known->left ? call->tally : known ? known->counter : Py_None;
    int64_t *left = known && known->left ? known->left : numbers_in(counter);
    if (!known || (left && *left <= 0) ||
        (program && (program->is_freed || program->active || by_block != (program->blocks[0] + program->blocks[1] > 0))))
        return 0;
    if (call->kind.is_counted && (call->options[COUNTS] == Py_None || (call->key.length > 1 && !have_parts(routes, call))))
        return 0;
    routes->read[0] = routes->read[1] = 0;
    if (is_idle(known->target) &&
        (call->views[0].obj || call->views[1].obj || !PyList_Size(PyTuple_GetItem(known->target, 1))))
        return 0;
    const Array *send = call->arrays[0], *recv = call->arrays[1];
    const char *from = call->data[0], *to = call->data[1];
    if (call->kind.is_typed) {
        if (known->typed.given && !are_as_they_were(&known->typed, call))
            return 0;
    } else if (by_block) {
        if (!have_blocks(routes, known, program, call))
            return 0;
    } else if (from && to && from < to + known->bytes[1] && to < from + known->bytes[0])
        return 0;
    if (!program && !((recv ? recv->flags : C_ORDER) & (send ? send->flags : C_ORDER) & C_ORDER))
        return 0; /* mpi4py takes no other order */
    if (call->server) {
        *call->server = program ? program->name : calls.native;
        Py_INCREF(*call->server);
    }
    if (!left)
        return run_known(routes, known, call);
    int64_t began = nanoseconds();
    Py_INCREF(counter); /* Python may forget the call while it runs */
    --left[0];
    int outcome = run_known(routes, known, call);
    left[1] += nanoseconds() - began;
    left[0] += outcome < 0; /* no call, for this rank: it may be made anew */
    Py_DECREF(counter);
    return outcome;
}

/* Serve a call that has been begun, if it is known; until `end_call` it owns what it is about. */
static int serve_known(Call *call, PyObject *collective, int any, unsigned options, PyObject *const *values,
                       PyObject *names)
{
    /* What waits is to let others go on. */
    Routes *routes = call->kind.begins || !Py_SIZE(calls.background) ? find_routes(call->comm) : NULL;
    call->rank = routes ? routes->rank : 0;
    call->tally = routes ? calls.tally : Py_None;
    int outcome = 0, is_alike = routes && any && !names;
    Py_XINCREF((PyObject *)routes);
    /* Of blocks of any sizes less is looked at where what serves all calls serves this one. */
    if (is_alike && !call->kind.is_even && describe_any(call, collective) == 0)
        outcome = serve(routes, call);
    if (!outcome && routes && describe(call, collective, options, values, names) == 0)
        outcome = serve(routes, call);
    if (!outcome && is_alike && call->kind.is_even && describe_any(call, collective) == 0)
        outcome = serve(routes, call);
    Py_XDECREF((PyObject *)routes);
    return outcome ? outcome : let_pass();
}

/* Of Python's: send, recv, root, algorithm, transport; of a reduction operation and order. */
static void begin_named(Call *call, PyObject *comm, PyObject *const *args, int is_reduction, Kind kind)
{
    begin_call(call, comm, args[0], args[1], kind);
    call->options[ROOT] = args[2];
    call->options[ALGORITHM] = args[3];
    call->options[TRANSPORT] = args[4];
    call->options[OP] = is_reduction ? args[5] : Py_None;
    call->options[ORDER] = is_reduction ? args[6] : Py_None;
}

/* What Python's function ``with`` makes of a call in the background: of a request, or of idle plans, and of the arrays that
 * are sent and received, None where there are none; NULL: those in a tuple. */
static PyObject *begun(PyObject *with, const Call *call)
{
    PyObject *what = call->request ? call->request : call->idle, *ends[2];
    for (int end = 0; end < 2; end++)
        ends[end] = call->arrays[end] ? (PyObject *)call->arrays[end] : Py_None;
    PyObject *result = with ? PyObject_CallFunctionObjArgs(with, what, ends[0], ends[1], NULL)
                            : PyTuple_Pack(3, what, ends[0], ends[1]);
    Py_DECREF(what);
    return result;
}

static PyObject *has_arguments(Py_ssize_t count, Py_ssize_t wanted)
{
    return count == wanted ? Py_None : PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, not %zd", wanted, count);
}

static PyObject *engine_call(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    (void)module;
    if (!has_arguments(count, count == 7 ? 7 : 9))
        return NULL;
    Call call;
    Kind kind;
    if (read_kind(args[0], &kind) < 0)
        return NULL;
    begin_named(&call, args[1], args + 2, count == 9, kind);
    int outcome = serve_known(&call, args[0], 0, 0, args + count, names);
    PyObject *result = outcome < 0                        ? NULL
                       : outcome && (call.idle || call.request) ? begun(NULL, &call)
                                                          : PyBool_FromLong(outcome);
    end_call(&call);
    return result;
}

/* Of a drop-in communicator's method that is watched: collective, communicator, send, recv, root, operation. */
static PyObject *engine_watched(PyObject *module, PyObject *args)
{
    PyObject *collective, *comm, *send, *recv, *root, *op, *server = NULL;
    Call call;
    Kind kind;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOO", &collective, &comm, &send, &recv, &root, &op) || read_kind(collective, &kind) < 0)
        return NULL;
    begin_call(&call, comm, send, recv, kind);
    call.options[ROOT] = root;
    call.options[OP] = op;
    call.server = &server;
    int outcome = serve_known(&call, collective, !kind.is_even, 0, NULL, NULL);
    end_call(&call);
    if (outcome > 0)
        return server;
    Py_XDECREF(server);
    return outcome < 0 ? NULL : PyUnicode_FromString("");
}

static PyObject *Routes_remember_all(Routes *self, PyObject *args)
{
    PyObject *target, *counter, *collective;
    if (!PyArg_ParseTuple(args, "OOO", &target, &counter, &collective))
        return NULL;
    Call call;
    Kind kind;
    if (read_kind(collective, &kind) < 0)
        return NULL;
    begin_call(&call, NULL, Py_None, Py_None, kind);
    if (describe_any(&call, collective) < 0 || keep(self, &call, target, counter, Py_None, Py_None) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Routes_remember(Routes *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (!has_arguments(count, 12))
        return NULL;
    Call call;
    Kind kind;
    if (read_kind(args[2], &kind) < 0)
        return NULL;
    begin_named(&call, NULL, args + 3, 1, kind);
    call.rank = self->rank;
    int good = describe(&call, args[2], 0, args + count, names);
    good = good == 0 && keep(self, &call, args[0], args[1], args[10], args[11]) > 0;
    end_call(&call);
    return let_pass() < 0 ? NULL : PyBool_FromLong(good);
}

/* ---- Functions, and methods of drop-in communicators: ``python`` serves what is not known here. */

static struct entry {
    int buffers;      /* how many it takes */
    int any;          /* of methods, whether it may be known of all calls alike what serves them */
    Kind kind;        /* of functions never even: their result is an array */
    unsigned options; /* that it has, a bit each */
    int more, place[OPTIONS]; /* of a method: those after the buffers, in their order */
    PyObject *collective, *python, *begun; /* see `begun` */
    PyMethodDef definition;
} entries[MOST_ENTRIES];
static int entries_used;

PyObject *call_python(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    Py_ssize_t first = self != NULL;
    PyObject *tuple = PyTuple_New(first + count), *options = named ? PyDict_New() : NULL, *result = NULL;
    for (Py_ssize_t each = 0; tuple && each < first + count; each++) {
        PyObject *argument = each < first ? self : args[each - first];
        Py_INCREF(argument);
        PyTuple_SetItem(tuple, each, argument);
    }
    int good = tuple && (options || !named);
    for (Py_ssize_t each = 0; each < named && good; each++)
        good = PyDict_SetItem(options, PyTuple_GetItem(names, each), args[count + each]) == 0;
    if (good)
        result = PyObject_Call(function, tuple, options);
    Py_XDECREF(tuple);
    Py_XDECREF(options);
    return result;
}

/* Of a call that was served; NotImplemented if Python is to serve it after all. */
static PyObject *result_of(const struct entry *entry, int is_function, const Call *call)
{
    if (call->idle || (call->request && is_function))
        return begun(entry->begun, call);
    if (call->request)
        return call->request;
    PyObject *result = is_function && call->arrays[1] ? (PyObject *)call->arrays[1] : Py_None;
    return Py_INCREF(result), result;
}

/* ``self`` is NULL in functions: these take the communicator first, options by name, and return the receive array. */
static PyObject *enter(int index, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const struct entry *entry = &entries[index];
    Py_ssize_t first = self == NULL, buffers = entry->buffers, more = count - first - buffers;
    int lacks_recv = !self && more == -1 && entry->kind.of_root == 1; /* which only the root has to give */
    int is_plain = more == 0 || lacks_recv;
    if (self)
        is_plain = (is_plain || (more > 0 && more <= entry->more && !names)) && !Py_SIZE(calls.observers);
    if (is_plain) {
        Call call;
        begin_call(&call, self ? self : args[0], buffers == 2 ? args[first] : Py_None,
                   buffers && !lacks_recv ? args[first + buffers - 1] : Py_None, entry->kind);
        if (entry->options >> OP & 1)
            call.options[OP] = calls.sum;
        for (Py_ssize_t each = 0; each < more; each++)
            call.options[entry->place[each]] = args[first + buffers + each];
        int outcome = serve_known(&call, entry->collective, entry->any, entry->options, args + count, names);
        PyObject *result = outcome > 0 ? result_of(entry, !self, &call) : NULL;
        end_call(&call);
        if (outcome && result != Py_NotImplemented)
            return result;
        Py_XDECREF(result);
    }
    return call_python(entry->python, self, args, count, names);
}

#define ENTRY(n)                                                                                                       \
    static PyObject *enter_##n(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)               \
    {                                                                                                                  \
        return enter(n, self, args, count, names);                                                                     \
    }
#define NAME(n) FAST(enter_##n),
#define ALL(x)                                                                                                         \
    EIGHT(x, 0, 1, 2, 3, 4, 5, 6, 7)                                                                                   \
    EIGHT(x, 8, 9, 10, 11, 12, 13, 14, 15)                                                                             \
    EIGHT(x, 16, 17, 18, 19, 20, 21, 22, 23)                                                                           \
    EIGHT(x, 24, 25, 26, 27, 28, 29, 30, 31)                                                                           \
    EIGHT(x, 32, 33, 34, 35, 36, 37, 38, 39)                                                                           \
    EIGHT(x, 40, 41, 42, 43, 44, 45, 46, 47)                                                                           \
    EIGHT(x, 48, 49, 50, 51, 52, 53, 54, 55) EIGHT(x, 56, 57, 58, 59, 60, 61, 62, 63)
ALL(ENTRY)
static const PyCFunction entry_functions[MOST_ENTRIES] = {ALL(NAME)};

static PyObject *engine_entry(PyObject *module, PyObject *args)
{
    PyObject *type, *where, *options;
    struct entry *entry = &entries[entries_used];
    const char *name, *doc;
    (void)module;
    if (entries_used == MOST_ENTRIES)
        Py_RETURN_NONE;
    if (!PyArg_ParseTuple(args, "OOssOiO!OO", &type, &where, &name, &doc, &entry->collective, &entry->buffers,
                          &PyTuple_Type, &options, &entry->python, &entry->begun))
        return NULL;
    for (Py_ssize_t each = 0; each < PyTuple_Size(options); each++)
        for (int option = 0; option < OPTIONS; option++)
            if (PyUnicode_Compare(PyTuple_GetItem(options, each), calls.options[option]) == 0) {
                entry->options |= 1u << option;
                entry->place[entry->more++] = option;
            }
    if (read_kind(entry->collective, &entry->kind) < 0)
        return NULL;
    entry->any = type != Py_None;
    entry->kind.is_even &= type != Py_None;
    Py_INCREF(args); /* for good, and so what it holds, the texts too */
    PyMethodDef made = {name, entry_functions[entries_used++], METH_FASTCALL | METH_KEYWORDS, doc};
    entry->definition = made;
    return type == Py_None ? PyCFunction_NewEx(&entry->definition, NULL, where)
                           : PyDescr_NewMethod((PyTypeObject *)type, &entry->definition);
}

/* ---- Routes in Python */

static int Routes_init(Routes *self, PyObject *args, PyObject *named)
{
    (void)named;
    if (self->places)
        PyErr_SetString(PyExc_RuntimeError, "routes are made once");
    PyObject *failed;
    if (self->places || !PyArg_ParseTuple(args, "Oii", &failed, &self->rank, &self->size))
        return -1;
    Py_INCREF(failed);
    self->failed = failed;
    self->places = PyMem_Calloc(PLACES, sizeof *self->places);
    self->numbers = PyMem_Calloc(4 * (size_t)self->size, sizeof *self->numbers);
    return self->places && self->numbers ? 0 : (PyErr_NoMemory(), -1);
}

static int Routes_traverse(Routes *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int place = 0; self->places && place < PLACES; place++)
        if (self->places[place])
            Py_VISIT(self->places[place]->target);
    Py_VISIT(self->failed);
    Py_VISIT(self->record);
    return 0;
}

static int Routes_clear_references(Routes *self)
{
    forget_all(self);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->record);
    return 0;
}

static void Routes_dealloc(Routes *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    Routes_clear_references(self);
    PyMem_Free(self->places);
    PyMem_Free(self->numbers);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *Routes_clear(Routes *self, PyObject *none)
{
    (void)none;
    forget_all(self);
    Py_RETURN_NONE;
}

static PyObject *Routes_open(Routes *self, PyObject *open)
{
    self->is_open = PyObject_IsTrue(open);
    Py_RETURN_NONE;
}

static PyObject *Routes_limit(Routes *self, PyObject *args)
{
    unsigned long long number;
    double seconds;
    PyObject *record;
    if (!PyArg_ParseTuple(args, "dKO", &seconds, &number, &record))
        return NULL;
    self->limit = seconds;
    self->number = (int64_t *)(uintptr_t)number;
    PyObject *before = self->record;
    Py_INCREF(record);
    self->record = record;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* Sizes and places of blocks of the call that was looked at last, for a program that is to serve it; whether the call has
 * told those of as many as the program has: an array without counts does not, nor what is in place. */
static PyObject *Routes_fill(Routes *self, PyObject *given)
{
    Program *program = (Program *)given;
    if (Py_TYPE(given) != program_type || program->blocks[0] > self->size || program->blocks[1] > self->size)
        return PyErr_Format(PyExc_TypeError, "not a program of this communicator: %R", given);
    if (program->blocks[0] != self->read[0] || program->blocks[1] != self->read[1])
        Py_RETURN_FALSE;
    for (int end = 0; end < 2; end++) {
        const int64_t *numbers = self->numbers + 2 * end * self->size;
        size_t bytes = (size_t)program->blocks[end] * sizeof *numbers;
        memcpy(program->tables[end].sizes, numbers, bytes);
        memcpy(program->tables[end].places, numbers + self->size, bytes);
    }
    Py_RETURN_TRUE;
}

static PyObject *Routes_tick(Routes *self, PyObject *none)
{
    (void)none;
    return PyLong_FromLongLong(++self->calls);
}

static Py_ssize_t Routes_length(Routes *self) { return self->count; }

static PyMethodDef routes_methods[] = {
    {"clear", (PyCFunction)Routes_clear, METH_NOARGS, "Forget all calls."},
    {"open", (PyCFunction)Routes_open, METH_O, "Whether calls may be served here."},
    {"remember", FAST(Routes_remember), METH_FASTCALL | METH_KEYWORDS,
     "remember(target, counter, collective, send, recv, root, algorithm, transport, op, order, typed, direct, **params): let a "
     "program, a method, or (what starts one, a list of idle plans) serve such calls, so many as the counter says, which "
     "counts nanoseconds, too, or (None) all; "
     "whether it will. typed, of blocks with datatypes of their own: (what came with each array, in tuples, and bytes of "
     "arrays), a list with the owner of the memory, the copies before and after, sizes and places. direct, for a method: "
     "what the MPI library's function is called with in its place."},
    {"remember_all", (PyCFunction)Routes_remember_all, METH_VARARGS,
     "remember_all(method, counter, collective): let mpi4py's method serve all calls of a drop-in communicator on memory "
     "of the host, so many as the counter says, unless something else serves them."},
    {"limit", (PyCFunction)Routes_limit, METH_VARARGS,
     "limit(seconds, number, record): how long calls may wait, 0: for ever; the address of their number, and what is "
     "called with the entry of each."},
    {"fill", (PyCFunction)Routes_fill, METH_O,
     "fill(program): with sizes and places of the blocks of the call for which idle plans were found just now; whether it "
     "has told them all."},
    {"tick", (PyCFunction)Routes_tick, METH_NOARGS, "Count a call; the number of calls."},
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

/* ---- The module */

static PyObject *engine_setup_calls(PyObject *module, PyObject *args)
{
    long long no_comm, no_type;
    (void)module;
    if (!PyArg_ParseTuple(args, "O(nL)O(nL)OOOOO", &calls.comm, &calls.offset, &no_comm, &calls.datatype,
                          &calls.type_offset, &no_type, &calls.background, &calls.observers, &calls.automatic,
                          &calls.sum, &calls.in_place))
        return NULL;
    Py_INCREF(args); /* for good, and so what it holds */
    no_communicator = no_comm;
    calls.no_type = no_type;
    PyObject *in_place = PyNumber_Long(calls.in_place);
    calls.in_place_address = in_place ? PyLong_AsVoidPtr(in_place) : NULL;
    Py_XDECREF(in_place);
    if (!calls.in_place_address)
        return NULL;
    for (int option = 0; option < OPTIONS; option++)
        calls.options[option] = PyUnicode_InternFromString(option_names[option]);
    calls.kinds = PyDict_New();
    calls.routes = PyDict_New();
    calls.beginnings = PyDict_New();
    calls.zero = PyLong_FromLong(0);
    calls.native = PyUnicode_InternFromString("native");
    return calls.kinds && calls.routes && calls.beginnings && calls.zero && calls.options[STREAM] ? Py_BuildValue("") : NULL;
}

static PyObject *engine_setup_arrays(PyObject *module, PyObject *args)
{
    PyTypeObject *array;
    PyObject *wide, *narrow;
    Array *example;
    unsigned long long data;
    int flags;
    (void)module;
    if (!PyArg_ParseTuple(args, "O(OKi)(OO)", &array, &example, &data, &flags, &wide, &narrow))
        return NULL;
    if ((uintptr_t)example->data != data || example->dimensions != 2 || example->type != wide ||
        example->flags != flags || example->shape[0] != 3 || example->shape[1] != 5)
        return PyErr_Format(PyExc_OSError, "arrays of this NumPy are laid out in a way that is not known");
    Py_INCREF(args); /* for good, and so what it holds */
    calls.wide = wide;
    calls.narrow = narrow;
    calls.array = array;
    return Py_BuildValue("");
}

static PyObject *engine_register(PyObject *module, PyObject *args)
{
    PyObject *handle, *routes, *tally;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &handle, &routes, &tally))
        return NULL;
    int outcome = 0;
    if (routes != Py_None)
        outcome = set_routes(handle, routes, tally);
    else
        unregister(handle);
    return outcome < 0 ? NULL : Py_BuildValue("");
}

static PyObject *engine_tally(PyObject *module, PyObject *handle)
{
    (void)module;
    PyObject *pair = PyDict_GetItemWithError(calls.routes, handle);
    PyObject *tally = pair ? PyTuple_GetItem(pair, 1) : Py_None;
    return Py_INCREF(tally), tally;
}

static PyObject *engine_begin_so(PyObject *module, PyObject *args)
{
    PyObject *kind, *pair;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOO", &calls.key, &kind, &pair))
        return NULL;
    if (PyDict_Size(calls.beginnings) >= MOST_KINDS)
        PyDict_Clear(calls.beginnings); /* Python says anew what comes again */
    return PyDict_SetItem(calls.beginnings, kind, pair) < 0 ? NULL : Py_BuildValue("");
}

static PyObject *engine_close(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    PyDict_Clear(calls.beginnings);
    PyDict_Clear(calls.routes);
    calls.last = NULL;
    return Py_BuildValue("");
}

static PyMethodDef functions[] = {
    {"setup_calls", engine_setup_calls, METH_VARARGS,
     "setup_calls(comm, (offset, null), datatype, (offset, null), background, observers, auto, sum, in place)"},
    {"setup_arrays", engine_setup_arrays, METH_VARARGS,
     "setup_arrays(array, (example, address, flags), types of counts): tell NumPy's arrays from other buffers. Raises\n"
     "OSError where they are not laid out as they were."},
    {"register", engine_register, METH_VARARGS,
     "register(handle, routes, tally): of a communicator; None: of one that is gone. The tally, an array or None, is of how\n"
     "many more calls routes may serve that were remembered without a counter, and of the nanoseconds that they took."},
    {"tally", engine_tally, METH_O, "tally(handle): what counts the calls of a communicator; None if nothing does."},
    {"begin_so", engine_begin_so, METH_VARARGS,
     "begin_so(key, (attribute, rank, size), (routes, tally)): communicators of which nothing is registered, with such an\n"
     "attribute by the key, are registered with these routes and a copy of the tally in their first call."},
    {"close", engine_close, METH_NOARGS, "Nothing is registered any more, and nothing begins."},
    {"call", FAST(engine_call), METH_FASTCALL | METH_KEYWORDS,
     "call(collective, comm, send, recv, root, algorithm, transport, op, order, **params): whether it was known, and is served;\n"
     "of one in the background, the request or idle plans, and the arrays that are sent and received."},
    {"watched", engine_watched, METH_VARARGS,
     "watched(collective, comm, send, recv, root, op): serves a call as the method of a drop-in communicator does, if it "
     "is known. Returns the name of the plan, or \"native\"; \"\" if it is not known."},
    {"entry", engine_entry, METH_VARARGS,
     "entry(type, module, name, doc, collective, buffers, options, python, begun): a method of that type, whose options "
     "come after the buffers, or (None) a function with such options; None if there are too many. begun(request or idle "
     "plans, send, recv): what it returns in the background, of arrays; a method, a request as it is."},
    {NULL, NULL, 0, NULL}};

int add_calls(PyObject *module)
{
    PyObject *routes = PyType_FromSpec(&routes_spec);
    if (!routes || PyModule_AddObject(module, "Routes", routes) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
