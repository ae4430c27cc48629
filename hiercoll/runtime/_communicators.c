/* mpi4py's methods that make communicators and free them, with what hiercoll does besides, for programs that make many
 * short-lived ones. Whatever is not usual is left to Python. */

#include "_engine.h"

enum { MOST_MAKERS = 16 };

static struct maker {
    PyObject *native, *python; /* mpi4py's method; what is called where ranks are to agree first */
    PyMethodDef definition;
} makers[MOST_MAKERS], freeing;
static int makers_used;
static PyObject *kinds, *drop_in; /* of communicators, by mpi4py's; what converts those of other types */

/* A new communicator as one of a drop-in kind. Takes the reference. */
static PyObject *of_our_kind(PyObject *made, const PyObject *parent, int64_t handle)
{
    PyObject *kind = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(made));
    if (handle == no_communicator || (!kind && Py_TYPE(made) == Py_TYPE((PyObject *)parent)))
        return made;
    PyObject *ours = PyObject_CallFunctionObjArgs(kind ? kind : drop_in, made, NULL);
    Py_DECREF(made);
    return ours;
}

/* All ranks call it, so what those of ``self`` have agreed on goes for what it makes, too: an even number. */
static PyObject *make(int index, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const struct maker *maker = &makers[index];
    int64_t comm;
    intptr_t wishes, has;
    if (!states || find_handle(self, &comm) < 0 || !find_attribute(comm, wishes_key, 0, &wishes) || wishes % 2)
        return let_pass() < 0 ? NULL : call_python(maker->python, self, args, count, names);
    PyObject *made = call_python(maker->native, self, args, count, names);
    if (!made || find_handle(made, &comm) < 0)
        return Py_XDECREF(made), NULL;
    if (!(made = of_our_kind(made, self, comm)))
        return NULL;
    if (!find_attribute(comm, wishes_key, 0, &has) && set_attribute(comm, wishes_key, wishes) < 0)
        Py_CLEAR(made);
    return made;
}

#define MAKER(n)                                                                                                       \
    static PyObject *make_##n(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)                \
    {                                                                                                                  \
        return make(n, self, args, count, names);                                                                      \
    }
#define NAME(n) FAST(make_##n),
#define ALL(x) EIGHT(x, 0, 1, 2, 3, 4, 5, 6, 7) EIGHT(x, 8, 9, 10, 11, 12, 13, 14, 15)
ALL(MAKER)
static const PyCFunction maker_functions[MOST_MAKERS] = {ALL(NAME)};

/* Python frees the session first, if there is one. */
static PyObject *free_communicator(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    int64_t comm;
    int is_known = 1;
    if (states && find_handle(self, &comm) == 0) {
        PyObject *handle = PyLong_FromUnsignedLongLong((unsigned long long)comm);
        is_known = !handle || PyDict_Contains(states, handle);
        if (!is_known)
            unregister(handle);
        Py_XDECREF(handle);
    }
    if (let_pass() < 0)
        return NULL;
    return call_python(is_known ? freeing.python : freeing.native, self, args, count, names);
}

static PyObject *describe_method(struct maker *maker, PyObject *args, PyCFunction function)
{
    PyTypeObject *type;
    const char *name, *doc;
    if (!PyArg_ParseTuple(args, "OssOO", &type, &name, &doc, &maker->native, &maker->python))
        return NULL;
    Py_INCREF(args); /* for good, and so what it holds, the texts too */
    PyMethodDef made = {name, function, METH_FASTCALL | METH_KEYWORDS, doc};
    maker->definition = made;
    return PyDescr_NewMethod(type, &maker->definition);
}

static PyObject *engine_makes(PyObject *module, PyObject *args)
{
    (void)module;
    if (makers_used == MOST_MAKERS)
        return PyErr_Format(PyExc_RuntimeError, "there are more than %d methods", MOST_MAKERS);
    int index = makers_used++;
    return describe_method(&makers[index], args, maker_functions[index]);
}

static PyObject *engine_frees(PyObject *module, PyObject *args)
{
    (void)module;
    return describe_method(&freeing, args, FAST(free_communicator));
}

static PyObject *engine_setup_communicators(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &kinds, &drop_in))
        return NULL;
    Py_INCREF(args); /* for good */
    return Py_BuildValue("");
}

static PyMethodDef functions[] = {
    {"setup_communicators", engine_setup_communicators, METH_VARARGS,
     "setup_communicators(kinds, drop_in): what mpi4py's types become; what is called with communicators of others."},
    {"makes", engine_makes, METH_VARARGS,
     "makes(type, name, doc, native, python): a method of that type that makes communicators by mpi4py's, or by Python's\n"
     "where the ranks of the communicator have not agreed yet, or something is special."},
    {"frees", engine_frees, METH_VARARGS,
     "frees(type, name, doc, native, python): the method that frees a communicator, by Python's if Python knows it."},
    {NULL, NULL, 0, NULL}};

int add_communicators(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
