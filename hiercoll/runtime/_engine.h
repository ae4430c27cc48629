/* What the parts of the compiled engine have in common: programs (_engine.c), calls that find them (_calls.c), packing
 * (_regions.c), the ends of communicators (_attributes.c), and their beginnings (_communicators.c). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Bases: send, recv, scratch, narrow, shared; sizes, which programs have themselves. */
enum { BASES = 6, GIVEN_BASES = 5, TABLES = 8 };

/* Of blocks, the bytes and where they begin in their buffer. Those that are not from ``least`` to ``below`` bytes long
 * are taken for empty: other messages have them. */
typedef struct {
    int64_t *sizes, *places, least, below;
} Table;

/* A step of a flow: its words, how many steps it needs, and which need it. It is complete when its words are done; one
 * that ``begins`` messages completes nothing, others are complete with them. */
typedef struct {
    int64_t from, to, needs, first, last, begins;
} Step;

typedef struct {
    PyObject_HEAD
    PyObject *owners;             /* what must live as long */
    int64_t *memory;              /* of all arrays below but the last two */
    int64_t *code;                /* words of all steps; see `enum kind` */
    Py_ssize_t length, at;        /* words; the step that the current start has come to */
    Py_ssize_t seen;              /* flags of that step that are raised */
    int awaited;                  /* whether its requests are gathered */
    int active, is_freed, requests, tag, rank;
    char *slots, *gathered, *statuses;
    int64_t bases[BASES], comm;
    Py_ssize_t blocks[2];         /* of send and recv, where their sizes are given with each start */
    Table tables[TABLES];         /* the first two: of all blocks of send and recv */
    int *lengths;                 /* of the pieces of a message, and where they begin */
    int64_t *beginnings;
    const Step *steps;            /* of a flow; NULL: in sequence */
    const int64_t *completes, *dependents; /* by slot, the step that is complete with its message; of all steps */
    int64_t number, left;         /* steps; those that are to be completed in the current start */
    int64_t *waiting, *ready[2];  /* by step, for how many others; steps to be launched: local ones, and messages */
    int64_t ready_count[2];
    int *found;                   /* slots, by the MPI library */
    int64_t *flags, *window;      /* of the window: its flags; the number of starts, and when it was used last */
    int64_t *sleepers;            /* of the node: ranks that sleep until a flag is raised; NULL: they do not */
    long long used;               /* when the program was, in calls */
    double limit, began;          /* seconds that a start may wait, 0: for ever; when it first waited for long */
    PyObject *name;               /* in words */
} Program;

extern PyTypeObject *program_type;
/* Of the MPI library, for attributes. */
extern void *mpi_create_keyval, *mpi_get_attribute, *mpi_set_attribute, *mpi_rank, *mpi_size, *mpi_test_inter, *mpi_group,
    *mpi_translate_ranks, *mpi_free_group;

typedef int (*get_number)(intptr_t, int *); /* of a communicator */
extern int64_t no_communicator; /* MPI.COMM_NULL */

/* Words of a copy (_regions.c), the bytes that lie apart, and where they lie together. */
typedef struct {
    const int64_t *words, *end;
    char *apart, *packed;
    Py_ssize_t nbytes;
} Move;

#define FAST(function) (PyCFunction)(void (*)(void))function
/* Functions that are alike but for a number. */
#define EIGHT(x, a, b, c, d, e, f, g, h) x(a) x(b) x(c) x(d) x(e) x(f) x(g) x(h)

int64_t get_handle(const char *at);
int64_t handle_of(intptr_t argument);          /* that the MPI library calls a function with */
int failed(int code);                          /* -1 with MPI.Exception */
/* MPI's function of that name, that for large counts if there is one; NULL if there is none. */
void *find_collective(const char *name, int *is_large);
int begin_program(Program *self);              /* 0, or -1 with an exception */
int advance_program(Program *self, int block); /* 1 when all is done, 0 if not, -1 with an exception */
void move_blocks(const Move *move, int outward);
int find_handle(PyObject *comm, int64_t *handle); /* of a communicator; -1, with an exception, if it is none */
/* Whether it has one, or takes over that of MPI.COMM_WORLD's processes; a null handle has none. */
int find_attribute(int64_t comm, int key, int takes_over, intptr_t *number);
int set_attribute(int64_t comm, int key, intptr_t number); /* 0, or -1 with an exception; nothing on a null handle */
/* The key by which communicators have the wishes that their ranks agreed on; ``states``: by handle, of those that Python
 * knows, NULL as long as there is no key. */
extern int wishes_key;
extern PyObject *states;
/* Of a function, or (with ``self``) a method: ``args`` are ``count`` ones by place, then those with ``names``, or NULL. */
PyObject *call_python(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);
int let_pass(void); /* clears an exception that is Python's to find again; -1 with one from outside, such as Ctrl-C */
void unregister(PyObject *handle);             /* nothing serves calls of that communicator any more */
int add_calls(PyObject *module);               /* 0, or -1 with an exception */
int add_regions(PyObject *module);             /* 0, or -1 with an exception */
int add_attributes(PyObject *module);          /* 0, or -1 with an exception */
int add_communicators(PyObject *module);       /* 0, or -1 with an exception */
