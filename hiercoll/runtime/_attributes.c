/* Attributes of communicators whose end hiercoll hears of from the MPI library itself. mpi4py's own would ask for the
 * communicator's topology first, which MPICH 5.0 looks up among the attributes that it is just freeing. */

#include "_engine.h"

static int may_copy;
int64_t no_communicator;
int wishes_key;
PyObject *states;

typedef int (*get_attribute_any)(intptr_t, int, void *, int *);
typedef int (*set_attribute_any)(intptr_t, int, void *);

typedef int (*get_group)(intptr_t, void *);
typedef int (*translate_ranks)(intptr_t, int, const int *, intptr_t, int *);
typedef int (*free_group)(void *);

/* What communicators of MPI.COMM_WORLD's processes take over. */
static struct {
    int is_there, key, undefined; /* MPI.UNDEFINED: no rank */
    long long number, group;      /* of these processes */
} everywhere;

/* Others come with MPI's dynamic processes. */
static int is_of_world(intptr_t comm)
{
    int size, is_inter, is_within;
    int64_t group = 0;
    if (((get_number)mpi_test_inter)(comm, &is_inter) || is_inter || ((get_number)mpi_size)(comm, &size) ||
        ((get_group)mpi_group)(comm, &group))
        return 0;
    int *ranks = PyMem_Malloc(2 * (size_t)size * sizeof *ranks), *found = ranks + size;
    for (int rank = 0; ranks && rank < size; rank++)
        ranks[rank] = rank;
    is_within = ranks && ((translate_ranks)mpi_translate_ranks)((intptr_t)get_handle((char *)&group), size, ranks,
                                                                (intptr_t)everywhere.group, found) == 0;
    for (int rank = 0; is_within && rank < size; rank++)
        is_within = found[rank] != everywhere.undefined;
    PyMem_Free(ranks);
    ((free_group)mpi_free_group)(&group);
    return is_within;
}

int find_attribute(int64_t comm, int key, int takes_over, intptr_t *number)
{
    int is_there = 0;
    if (comm == no_communicator || ((get_attribute_any)mpi_get_attribute)((intptr_t)comm, key, number, &is_there))
        return 0;
    if (is_there || !takes_over || !everywhere.is_there || key != everywhere.key || !is_of_world((intptr_t)comm))
        return is_there;
    *number = (intptr_t)everywhere.number;
    return ((set_attribute_any)mpi_set_attribute)((intptr_t)comm, key, (void *)*number) == 0;
}

int set_attribute(int64_t comm, int key, intptr_t number)
{
    int error = comm == no_communicator
                    ? 0
                    : ((set_attribute_any)mpi_set_attribute)((intptr_t)comm, key, (void *)number);
    return error ? PyErr_Format(PyExc_RuntimeError, "MPI_Comm_set_attr: error %d", error), -1 : 0;
}

/* A communicator has 4 or 8 bytes. */
static int copy_even(intptr_t comm, int key, void *extra, void *value, void *copy, int *is_copied)
{
    (void)comm, (void)key, (void)extra;
    *is_copied = may_copy && (intptr_t)value % 2 == 0;
    *(void **)copy = value;
    return 0;
}

/* ``extra``: what is called, and for which handles: those in a dictionary, or (None) all. */
static int call_deleted(intptr_t comm, int key, void *value, void *extra)
{
    (void)key, (void)value;
    if (!Py_IsInitialized()) /* MPI may end after Python has */
        return 0;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *kind, *error, *trace; /* of who frees the communicator while it handles an exception */
    PyErr_Fetch(&kind, &error, &trace);
    PyObject *function = PyTuple_GetItem(extra, 0), *among = PyTuple_GetItem(extra, 1);
    PyObject *handle = PyLong_FromUnsignedLongLong((unsigned long long)handle_of(comm));
    unregister(handle);
    if (among == Py_None || PyDict_Contains(among, handle)) {
        PyObject *done = PyObject_CallFunctionObjArgs(function, handle, NULL);
        if (!done)
            PyErr_WriteUnraisable(function);
        Py_XDECREF(done);
    }
    Py_XDECREF(handle);
    PyErr_Restore(kind, error, trace);
    PyGILState_Release(state);
    return 0;
}

typedef int (*create_keyval)(int (*)(intptr_t, int, void *, void *, void *, int *),
                             int (*)(intptr_t, int, void *, void *), int *, void *);

static PyObject *engine_attribute_key(PyObject *module, PyObject *args)
{
    PyObject *function, *among;
    int key;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOp", &function, &among, &may_copy))
        return NULL;
    Py_INCREF(args); /* for good: keys are never freed */
    int error = ((create_keyval)mpi_create_keyval)(copy_even, call_deleted, &key, args);
    if (error)
        return PyErr_Format(PyExc_RuntimeError, "MPI_Comm_create_keyval: error %d", error);
    if (among != Py_None)
        wishes_key = key, states = among;
    return PyLong_FromLong(key);
}

static PyObject *engine_attribute(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t comm;
    intptr_t number;
    (void)module;
    if (count != 3 || find_handle(args[1], &comm) < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "three arguments are wanted");
    if (!find_attribute(comm, (int)PyLong_AsLong(args[0]), args[2] == Py_True, &number))
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(number);
}

static PyObject *engine_set_attribute(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t comm;
    (void)module;
    if (count != 3 || find_handle(args[1], &comm) < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "three arguments are wanted");
    int outcome = set_attribute(comm, (int)PyLong_AsLong(args[0]), PyLong_AsSsize_t(args[2]));
    return outcome < 0 ? NULL : Py_BuildValue("");
}

static PyObject *engine_set_everywhere(PyObject *module, PyObject *args)
{
    PyObject *number;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOLi", &everywhere.key, &number, &everywhere.group, &everywhere.undefined))
        return NULL;
    everywhere.is_there = number != Py_None;
    everywhere.number = everywhere.is_there ? PyLong_AsLongLong(number) : 0;
    return PyErr_Occurred() ? NULL : Py_BuildValue("");
}

static PyMethodDef functions[] = {
    {"attribute_key", engine_attribute_key, METH_VARARGS,
     "attribute_key(deleted, among, copies): a key for attributes of communicators that are numbers, of which duplicates\n"
     "take over even ones, if any. When one is deleted, nothing serves calls of its communicator any more, and\n"
     "deleted(handle) is called if the handle is in the dictionary among, or that is None; not after Python has ended.\n"
     "With a dictionary it is the key of what ranks have agreed on."},
    {"attribute", FAST(engine_attribute), METH_FASTCALL,
     "attribute(key, comm, takes_over): the number that a communicator has by this key, or (True) takes over from\n"
     "everywhere; None if there is none."},
    {"set_everywhere", engine_set_everywhere, METH_VARARGS,
     "set_everywhere(key, number, group, undefined): what communicators take over that have none by this key, if all of\n"
     "their processes are in the group; None: nothing any more."},
    {"set_attribute", FAST(engine_set_attribute), METH_FASTCALL,
     "set_attribute(key, comm, number): put it there; nothing on MPI.COMM_NULL."},
    {NULL, NULL, 0, NULL}};

int add_attributes(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
