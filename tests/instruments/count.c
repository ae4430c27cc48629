/* Counts the calls of MPI's collectives, and messages, whoever makes them: preloaded, it stands before the MPI library, and calls it
 * by its profiling names. Works for any MPI library without its header: arguments are passed on as they come, in
 * registers and on the stack, so many as any of these functions has. Each process writes "NAME COUNT" lines to
 * $COUNT_FOLDER/PID when it ends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*function)(long, long, long, long, long, long, long, long, long, long, long, long);

struct wanted {
    const char *name;
    function found;
};

/* Looks for a function in one of the libraries that are loaded, and in those that it needs: mpi4py loads the MPI
 * library for itself alone, so that a look-up among all does not find it. */
static int look(struct dl_phdr_info *info, size_t size, void *data)
{
    struct wanted *wanted = data;
    void *library = info->dlpi_name[0] ? dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (library) {
        wanted->found = (function)dlsym(library, wanted->name);
        dlclose(library);
    }
    return wanted->found != NULL;
}

static function real_one(const char *name)
{
    struct wanted wanted = {name, NULL};
    dl_iterate_phdr(look, &wanted);
    if (!wanted.found) {
        fprintf(stderr, "count.c: there is no %s\n", name);
        abort();
    }
    return wanted.found;
}

#define PLAIN(X)                                                                                         \
    X(Alltoall) X(Ialltoall) X(Alltoall_init) X(Allgather) X(Iallgather) X(Allgather_init)               \
    X(Alltoallv) X(Ialltoallv) X(Alltoallv_init) X(Isend) X(Irecv)

/* A library without MPI-4's large counts must not seem to have them: mpi4py looks. */
#ifdef LARGE
#define COUNTED(X)                                                                                       \
    PLAIN(X)                                                                                             \
    X(Alltoall_c) X(Ialltoall_c) X(Alltoall_init_c) X(Allgather_c) X(Iallgather_c) X(Allgather_init_c)   \
    X(Alltoallv_c) X(Ialltoallv_c) X(Alltoallv_init_c) X(Isend_c) X(Irecv_c)
#else
#define COUNTED(X) PLAIN(X)
#endif

#define WRAPPED(NAME)                                                                                    \
    static long count_##NAME;                                                                            \
    int MPI_##NAME(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j,       \
                   long k, long l)                                                                       \
    {                                                                                                    \
        static function real;                                                                            \
        if (!real) real = real_one("PMPI_" #NAME);                                                       \
        count_##NAME++;                                                                                  \
        return real(a, b, c, d, e, f, g, h, i, j, k, l);                                                 \
    }

COUNTED(WRAPPED)

__attribute__((destructor)) static void report(void)
{
    const char *folder = getenv("COUNT_FOLDER");
    char path[4096];
    if (!folder) return;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    FILE *file = fopen(path, "w");
    if (!file) return;
#define LINE(NAME) if (count_##NAME) fprintf(file, "%s %ld\n", #NAME, count_##NAME);
    COUNTED(LINE)
    fclose(file);
}
