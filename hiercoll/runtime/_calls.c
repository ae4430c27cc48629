/* From the arguments of a call to its program, in one look-up.
 *
 * A key holds all that tells a call from others, but for the addresses of its buffers: collective, root, sizes and types
 * of arrays, algorithm, transport and parameters. Whatever is not a plain call on arrays, or is wrong, is left to Python,
 * which looks at it from the beginning, and says what is wrong. */

#include "_engine.h"
#include <string.h>

enum {
    MOST_KNOWN = 256, /* calls on a communicator */
    MOST_NATIVE = 64, /* sizes that are known to be left to the MPI library */
    KEY_BYTES = 512,
    FORMAT_BYTES = 8,
    METHODS = 32
};

typedef struct {
    PyObject_HEAD
    PyObject *known;  /* programs, or mpi4py's methods, by key */
    PyObject *failed; /* called with a program in which an exception was raised */
    int is_open;      /* whether calls may be served here */
    int sizes;
    struct {
        PyObject *collective;
        Py_ssize_t bytes;
    } native[MOST_NATIVE];
    long long calls;
} Routes;

static struct {
    PyTypeObject *comm, *array;
    Py_ssize_t offset;                /* of the handle in a communicator object */
    PyObject *background, *observers; /* lists: calls go past here while there is something in them */
    PyObject *automatic, *plain;      /* "auto"; no parameters */
    PyObject *routes;                 /* of each communicator, by handle */
    int64_t last_handle;
    Routes *last; /* borrowed from ``routes`` */
} calls;

/* The routes of a communicator that serves calls now; NULL if there are none. */
static Routes *find_routes(PyObject *comm)
{
    if (!calls.comm || !PyType_IsSubtype(Py_TYPE(comm), calls.comm))
        return NULL;
    int64_t handle = get_handle((char *)comm + calls.offset);
    if (!calls.last || handle != calls.last_handle) {
        PyObject *number = PyLong_FromLongLong(handle);
        calls.last = number ? (Routes *)PyDict_GetItemWithError(calls.routes, number) : NULL;
        calls.last_handle = handle;
        Py_XDECREF(number);
    }
    return calls.last && calls.last->is_open && !PyList_Size(calls.background) ? calls.last : NULL;
}

/* ---- Keys. Functions return 0, or -1 for what Python is to look at (perhaps with an exception, of no interest). */

typedef struct {
    char bytes[KEY_BYTES];
    size_t length;
} Key;

/* A call's buffers, and what tells it from others. */
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

static int add(Key *key, const void *from, size_t count)
{
    if (key->length + count > KEY_BYTES)
        return -1;
    memcpy(key->bytes + key->length, from, count);
    key->length += count;
    return 0;
}

static int add_number(Key *key, int64_t number) { return add(key, &number, 8); }

static int add_text(Key *key, PyObject *text)
{
    Py_ssize_t length;
    const char *from = PyUnicode_CheckExact(text) ? PyUnicode_AsUTF8AndSize(text, &length) : NULL;
    return !from || length > KEY_BYTES || add_number(key, length) < 0 ? -1 : add(key, from, (size_t)length);
}

static int add_buffer(Key *key, const Py_buffer *view)
{
    char format[FORMAT_BYTES] = {0};
    if (!view->format || strlen(view->format) >= FORMAT_BYTES)
        return -1;
    memcpy(format, view->format, strlen(view->format));
    return add_number(key, view->len) < 0 ? -1 : add(key, format, FORMAT_BYTES);
}

/* Whatever is not a whole number or a text (True and 2.0 equal numbers) is for Python to refuse. */
static int add_parameters(Key *key, PyObject *params)
{
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_CheckExact(params) && PyDict_Next(params, &position, &name, &value)) {
        int overflow = 0;
        if (add_text(key, name) < 0)
            return -1;
        if (!PyLong_CheckExact(value)) {
            if (add_text(key, value) < 0)
                return -1;
        } else if (add_number(key, -1) < 0 || add_number(key, PyLong_AsLongLongAndOverflow(value, &overflow)) < 0 ||
                   overflow)
            return -1;
    }
    return PyDict_CheckExact(params) ? 0 : -1;
}

static int view_array(PyObject *array, Py_buffer *view, int flags, Call *call)
{
    if (Py_TYPE(array) != calls.array ||
        PyObject_GetBuffer(array, view, flags | PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS) < 0)
        return -1;
    call->views++;
    return 0;
}

/* A call with equal blocks, whose receive buffer has been looked at. */
static int describe(Call *call, PyObject *collective, PyObject *send, PyObject *root, PyObject *algorithm,
                    PyObject *transport, PyObject *params)
{
    Key *key = &call->key;
    key->length = 0;
    int overflow = 0;
    if ((root && !PyLong_CheckExact(root)) || add_number(key, (int64_t)(uintptr_t)collective) < 0 ||
        add_number(key, root ? PyLong_AsLongLongAndOverflow(root, &overflow) : 0) < 0 || overflow ||
        add_buffer(key, &call->recv) < 0)
        return -1;
    if (send != Py_None) {
        if (view_array(send, &call->send, 0, call) < 0 || add_buffer(key, &call->send) < 0)
            return -1;
        const char *to = call->recv.buf, *from = call->send.buf;
        if (from < to + call->recv.len && to < from + call->send.len)
            return -1;
    }
    return add_text(key, algorithm) < 0 || add_text(key, transport) < 0 ? -1 : add_parameters(key, params);
}

/* Of a list or a tuple of two, an array and what says which blocks it has; of an array alone, all of it (NULL). */
static PyObject *split(PyObject *given, PyObject **blocks)
{
    *blocks = NULL;
    if (PyList_CheckExact(given) && PyList_Size(given) == 2) {
        *blocks = PyList_GetItem(given, 1);
        return PyList_GetItem(given, 0);
    }
    if (PyTuple_CheckExact(given) && PyTuple_Size(given) == 2) {
        *blocks = PyTuple_GetItem(given, 1);
        return PyTuple_GetItem(given, 0);
    }
    return given;
}

/* A call with blocks of any sizes: all but the sizes, which come with each start. */
static int describe_blocks(Call *call, PyObject *const *args, PyObject *blocks[2])
{
    PyObject *collective = args[0], *send = split(args[2], &blocks[0]), *recv = split(args[3], &blocks[1]);
    Key *key = &call->key;
    key->length = 0;
    if (!blocks[1] || view_array(recv, &call->recv, PyBUF_WRITABLE, call) < 0 ||
        view_array(send, &call->send, 0, call) < 0 || !call->send.itemsize || !call->recv.itemsize)
        return -1;
    if (add_number(key, (int64_t)(uintptr_t)collective) < 0 || add_number(key, blocks[0] != NULL) < 0)
        return -1;
    return add_text(key, args[4]) < 0 ? -1 : add_parameters(key, args[5]);
}

/* Whole numbers of a list, or of an array of signed ones. */
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
    Py_buffer view;
    if (Py_TYPE(from) != calls.array || PyObject_GetBuffer(from, &view, PyBUF_FORMAT | PyBUF_ND) < 0)
        return -1;
    int good = view.ndim == 1 && view.len == count * view.itemsize && view.format && !view.format[1] &&
               strchr("ilq", view.format[0]) && (view.itemsize == 4 || view.itemsize == 8);
    for (Py_ssize_t each = 0; each < count && good; each++)
        numbers[each] = view.itemsize == 8 ? ((int64_t *)view.buf)[each] : ((int32_t *)view.buf)[each];
    PyBuffer_Release(&view);
    return good ? 0 : -1;
}

/* Sizes and places in bytes, of an array's counts or of (counts, displacements) in its elements. */
static int read_blocks(PyObject *given, const Py_buffer *view, int64_t *sizes, int64_t *places, Py_ssize_t count)
{
    PyObject *displacements = NULL, *counts = given;
    if (!given && view->len <= INT32_MAX) { /* all of the array */
        sizes[0] = view->len;
        return 0;
    }
    if (given && PyTuple_CheckExact(given))
        counts = PyTuple_Size(given) == 2 ? split(given, &displacements) : NULL;
    if (!counts || read_numbers(counts, sizes, count) < 0)
        return -1;
    if (displacements && read_numbers(displacements, places, count) < 0)
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

/* ---- Serving. Functions return 1 if a call was served, 0 if Python is to serve it, -1 with an exception. */

/* What serves calls with this key, borrowed; NULL, perhaps with an exception, if that is not known. */
static PyObject *find(Routes *routes, const Key *key)
{
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    PyObject *found = bytes ? PyDict_GetItemWithError(routes->known, bytes) : NULL;
    Py_XDECREF(bytes);
    return found;
}

static int keep(Routes *routes, const Key *key, PyObject *target)
{
    if (PyDict_Size(routes->known) >= MOST_KNOWN)
        PyDict_Clear(routes->known);
    PyObject *bytes = PyBytes_FromStringAndSize(key->bytes, (Py_ssize_t)key->length);
    int outcome = bytes && PyDict_SetItem(routes->known, bytes, target) == 0 ? 1 : -1;
    Py_XDECREF(bytes);
    return outcome;
}

static int run(Routes *routes, Program *program, const Call *call)
{
    if (program->is_freed || program->active)
        return 0;
    Py_INCREF((PyObject *)program);
    program->used = ++routes->calls;
    if (program->window)
        program->window[1] = routes->calls;
    program->bases[0] = call->views > 1 ? (int64_t)(uintptr_t)call->send.buf : 0;
    program->bases[1] = (int64_t)(uintptr_t)call->recv.buf;
    int outcome = begin_program(program) < 0 ? -1 : advance_program(program, 1);
    if (outcome < 0) { /* the session is told */
        PyObject *kind, *error, *trace;
        routes->is_open = 0;
        PyErr_Fetch(&kind, &error, &trace);
        Py_XDECREF(PyObject_CallFunctionObjArgs(routes->failed, (PyObject *)program, NULL));
        PyErr_Restore(kind, error, trace);
    }
    Py_DECREF((PyObject *)program);
    return outcome;
}

/* mpi4py's own call; ``native`` is a function of communicators, or (``comm`` is NULL) the method of one. */
static PyObject *call_native(PyObject *native, PyObject *comm, PyObject *send, PyObject *recv, PyObject *root)
{
    PyObject *first = send == Py_None ? recv : send, *second = send == Py_None ? root : recv;
    if (!comm)
        return PyObject_CallFunctionObjArgs(native, first, second, NULL);
    return PyObject_CallFunctionObjArgs(native, comm, first, second, NULL);
}

static int serve(Routes *routes, Call *call, PyObject *send, PyObject *recv, PyObject *root)
{
    PyObject *found = find(routes, &call->key);
    if (!found || Py_TYPE(found) == program_type)
        return found ? run(routes, (Program *)found, call) : PyErr_Occurred() ? -1 : 0;
    if (!PyBuffer_IsContiguous(&call->recv, 'C') || (call->views > 1 && !PyBuffer_IsContiguous(&call->send, 'C')))
        return 0; /* mpi4py takes no other order */
    PyObject *done = call_native(found, NULL, send, recv, root);
    Py_XDECREF(done);
    return done ? 1 : -1;
}

static PyObject *outcome_of(int outcome, Call *call)
{
    if (outcome >= 0)
        PyErr_Clear();
    end_call(call);
    return outcome < 0 ? NULL : PyBool_FromLong(outcome);
}

static PyObject *has_arguments(Py_ssize_t count, Py_ssize_t wanted)
{
    return count == wanted ? Py_None : PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, not %zd", wanted, count);
}

static PyObject *engine_call(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (!has_arguments(count, 8))
        return NULL;
    Call call = {.views = 0};
    Routes *routes = find_routes(args[1]);
    int outcome = 0;
    if (routes && view_array(args[3], &call.recv, PyBUF_WRITABLE, &call) == 0 &&
        describe(&call, args[0], args[2], args[4], args[5], args[6], args[7]) == 0)
        outcome = serve(routes, &call, args[2], args[3], args[4]);
    return outcome_of(outcome, &call);
}

static PyObject *engine_call_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (!has_arguments(count, 6))
        return NULL;
    Call call = {.views = 0};
    Routes *routes = find_routes(args[1]);
    PyObject *blocks[2];
    int outcome = 0;
    Program *program = NULL;
    if (routes && describe_blocks(&call, args, blocks) == 0 && (program = (Program *)find(routes, &call.key)) &&
        !program->active) {
        int64_t **sizes = program->sizes, **places = program->places;
        Py_ssize_t *number = program->blocks, own = number[0] > 1 ? program->rank : 0;
        if (read_blocks(blocks[0], &call.send, sizes[0], places[0], number[0]) == 0 &&
            read_blocks(blocks[1], &call.recv, sizes[1], places[1], number[1]) == 0 &&
            sizes[0][own] == sizes[1][program->rank])
            outcome = run(routes, program, &call);
    }
    return outcome_of(outcome, &call);
}

static PyObject *engine_remember(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (!has_arguments(count, 9))
        return NULL;
    Call call = {.views = 0};
    int outcome = 0;
    if (view_array(args[3], &call.recv, PyBUF_WRITABLE, &call) == 0 &&
        describe(&call, args[1], args[2], args[4], args[5], args[6], args[7]) == 0)
        outcome = keep((Routes *)args[0], &call.key, args[8]);
    return outcome_of(outcome, &call);
}

static PyObject *engine_remember_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (!has_arguments(count, 7))
        return NULL;
    Call call = {.views = 0};
    PyObject *blocks[2], *described[] = {args[1], NULL, args[2], args[3], args[4], args[5]};
    int outcome = 0;
    if (describe_blocks(&call, described, blocks) == 0)
        outcome = keep((Routes *)args[0], &call.key, args[6]);
    return outcome_of(outcome, &call);
}

/* ---- Routes in Python */

static int Routes_init(Routes *self, PyObject *args, PyObject *named)
{
    (void)named;
    if (self->known)
        PyErr_SetString(PyExc_RuntimeError, "routes are made once");
    if (self->known || !PyArg_ParseTuple(args, "O", &self->failed))
        return -1;
    Py_INCREF(self->failed);
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
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "On", &collective, &bytes))
        return NULL;
    if (self->sizes < MOST_NATIVE) {
        self->native[self->sizes].collective = collective;
        self->native[self->sizes++].bytes = bytes;
    }
    Py_RETURN_NONE;
}

static Py_ssize_t Routes_length(Routes *self) { return PyDict_Size(self->known); }

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

/* ---- Methods of drop-in communicators */

/* What a method is of: ``python`` serves what is not known here, ``native`` is mpi4py's own. */
static struct method {
    int one_buffer;
    PyObject *collective, *python, *native;
    PyMethodDef definition;
} methods[METHODS];
static int methods_used;

static PyObject *call_python(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *tuple = PyTuple_New(count + 1), *options = PyDict_New(), *result = NULL;
    for (Py_ssize_t each = -1; tuple && each < count; each++) {
        PyObject *argument = each < 0 ? self : args[each];
        Py_INCREF(argument);
        PyTuple_SetItem(tuple, each + 1, argument);
    }
    int good = tuple && options;
    for (Py_ssize_t each = 0; each < named && good; each++)
        good = PyDict_SetItem(options, PyTuple_GetItem(names, each), args[count + each]) == 0;
    if (good)
        result = PyObject_Call(function, tuple, options);
    Py_XDECREF(tuple);
    Py_XDECREF(options);
    return result;
}

static int is_native(const Routes *routes, const struct method *method, const Call *call)
{
    for (int each = 0; each < routes->sizes; each++)
        if (routes->native[each].collective == method->collective && routes->native[each].bytes == call->recv.len)
            return 1;
    return 0;
}

static PyObject *call_method(int index, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const struct method *method = &methods[index];
    int one = method->one_buffer, is_plain = !names && (count == 2 || (one && count == 1));
    Routes *routes = is_plain && !PyList_Size(calls.observers) ? find_routes(self) : NULL;
    PyObject *send = one ? Py_None : routes ? args[0] : NULL, *recv = routes ? args[!one] : NULL;
    PyObject *root = one && count == 2 ? args[1] : NULL;
    Call call = {.views = 0};
    int outcome = 0, native = 0;
    if (routes && view_array(recv, &call.recv, PyBUF_WRITABLE, &call) == 0) {
        native = (one || Py_TYPE(send) == calls.array) && is_native(routes, method, &call);
        if (!native &&
            describe(&call, method->collective, send, root, calls.automatic, calls.automatic, calls.plain) == 0)
            outcome = serve(routes, &call, send, recv, root);
    }
    PyObject *served = outcome_of(outcome, &call);
    if (served != Py_False)
        return served ? Py_DECREF(served), Py_BuildValue("") : NULL;
    Py_DECREF(served);
    return native ? call_native(method->native, self, send, recv, root)
                  : call_python(method->python, self, args, count, names);
}

#define METHOD(n)                                                                                                      \
    static PyObject *method_##n(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)              \
    {                                                                                                                  \
        return call_method(n, self, args, count, names);                                                               \
    }
#define NAME(n) (PyCFunction)(void (*)(void))method_##n,
#define EIGHT(x, a, b, c, d, e, f, g, h) x(a) x(b) x(c) x(d) x(e) x(f) x(g) x(h)
#define ALL(x)                                                                                                         \
    EIGHT(x, 0, 1, 2, 3, 4, 5, 6, 7)                                                                                   \
    EIGHT(x, 8, 9, 10, 11, 12, 13, 14, 15)                                                                             \
    EIGHT(x, 16, 17, 18, 19, 20, 21, 22, 23) EIGHT(x, 24, 25, 26, 27, 28, 29, 30, 31)
ALL(METHOD)
static const PyCFunction method_functions[METHODS] = {ALL(NAME)};

static PyObject *engine_method(PyObject *module, PyObject *args)
{
    PyTypeObject *type;
    struct method *method = &methods[methods_used];
    const char *name;
    (void)module;
    if (methods_used == METHODS)
        return Py_BuildValue("");
    if (!PyArg_ParseTuple(args, "OsOpOO", &type, &name, &method->collective, &method->one_buffer, &method->python,
                          &method->native))
        return NULL;
    Py_INCREF(args); /* for good, and so what it holds, the name too */
    PyMethodDef made = {name, method_functions[methods_used++], METH_FASTCALL | METH_KEYWORDS, "As mpi4py's."};
    method->definition = made;
    return PyDescr_NewMethod(type, &method->definition);
}

/* ---- The module */

static PyObject *engine_setup_calls(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "OnOOOO", &calls.comm, &calls.offset, &calls.array, &calls.background, &calls.observers,
                          &calls.automatic))
        return NULL;
    Py_INCREF(args); /* for good, and so what it holds */
    calls.routes = PyDict_New();
    calls.plain = PyDict_New();
    return calls.routes && calls.plain ? Py_BuildValue("") : NULL;
}

static PyObject *engine_register(PyObject *module, PyObject *args)
{
    PyObject *handle, *routes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &handle, &routes))
        return NULL;
    calls.last = NULL;
    int outcome = 0;
    if (routes != Py_None)
        outcome = PyDict_SetItem(calls.routes, handle, routes);
    else if (PyDict_GetItemWithError(calls.routes, handle))
        outcome = PyDict_DelItem(calls.routes, handle);
    return outcome < 0 ? NULL : Py_BuildValue("");
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL
static PyMethodDef functions[] = {
    {"setup_calls", engine_setup_calls, METH_VARARGS, "setup_calls(comm, offset, array, background, observers, auto)"},
    {"register", engine_register, METH_VARARGS, "register(handle, routes): of a communicator; None: of one that is gone."},
    {"call", FAST(engine_call),
     "call(collective, comm, send, recv, root, algorithm, transport, params): whether it was known, and is served."},
    {"call_blocks", FAST(engine_call_blocks),
     "call_blocks(collective, comm, send, recv, algorithm, params): the same for blocks of any sizes."},
    {"remember", FAST(engine_remember),
     "remember(routes, collective, send, recv, root, algorithm, transport, params, target): a program or a method."},
    {"remember_blocks", FAST(engine_remember_blocks),
     "remember_blocks(routes, collective, send, recv, algorithm, params, program)"},
    {"method", engine_method, METH_VARARGS,
     "method(type, name, collective, one_buffer, python, native): of communicators; None if there are too many."},
    {NULL, NULL, 0, NULL}};

int add_calls(PyObject *module)
{
    PyObject *routes = PyType_FromSpec(&routes_spec);
    if (!routes || PyModule_AddObject(module, "Routes", routes) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
