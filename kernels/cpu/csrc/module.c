/* The operations as functions of Python. Arrays come as addresses: the callers in ../native.py have
 * checked types, shapes and layouts, and hold the arrays. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>
#include <sys/mman.h>

#include "operations.h"
#include "pool.h"

/* Products of more than this many multiplications let other Python threads run meanwhile. */
#define LONG_PRODUCT (1LL << 25)

/* Bytes of input rows that should stay in a core's second-level cache beside a panel. */
#define CHUNK_BYTES (768 << 10)

static const operations *chosen = &operations_generic;

static const operations *sets[5]; /* best first, NULL after the last */

static void find_sets(void) {
    int count = 0;
#ifdef HAS_X86_SETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
        if (__builtin_cpu_supports("avx512vnni"))
            sets[count++] = &operations_avx512vnni;
        sets[count++] = &operations_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        sets[count++] = &operations_avx2;
#endif
    sets[count] = &operations_generic;
    chosen = sets[0];
}

/* -- arguments -------------------------------------------------------------------------------------- */

/* An argument of an operation, as Python or a program gives it. */
typedef union {
    int64_t integer;
    void *address;
    double number;
} word;

static int64_t integer(word value) { return value.integer; }
static float *floats(word value) { return value.address; }
static int64_t *integers(word value) { return value.address; }
static float number(word value) { return (float)value.number; }

#define MOST_ARGUMENTS 20

/* Each takes its words and returns 0, or -1: no memory. */
#define OPERATION(name) static int run_##name(const word *a)

/* Lets other Python threads run during products of more than LONG_PRODUCT multiplications; NULL where
 * nothing is to be given back, as in a program, which runs without the lock as a whole. */
static PyThreadState *unlock(int64_t multiplications) {
    return multiplications > LONG_PRODUCT && PyGILState_Check() ? PyEval_SaveThread() : NULL;
}

static void lock(PyThreadState *state) {
    if (state)
        PyEval_RestoreThread(state);
}

/* -- operations ------------------------------------------------------------------------------------- */

OPERATION(pack) {
    const float *weight = floats(a[0]);
    int64_t out_size = integer(a[1]), in_size = integer(a[2]);
    float *panels = floats(a[3]);
    int64_t columns = (out_size + PANEL - 1) / PANEL * PANEL;
#ifdef MADV_HUGEPAGE
    /* Few large pages: weights are read from end to end. Where this is refused nothing is lost. */
    uintptr_t page = 2 << 20, first = ((uintptr_t)panels + page - 1) / page * page;
    uintptr_t last = (uintptr_t)(panels + columns * in_size) / page * page;
    if (last > first)
        (void)madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
    for (int64_t n = 0; n < columns; n++)
        for (int64_t k = 0; k < in_size; k++)
            panels[n / PANEL * PANEL * in_size + k * PANEL + n % PANEL] =
                n < out_size ? weight[n * in_size + k] : 0.0f;
    return 0;
}

OPERATION(linear) {
    linear_args args = {.input = floats(a[0]),
                        .rows = integer(a[1]),
                        .in_size = integer(a[2]),
                        .out_size = integer(a[3]),
                        .panels = floats(a[4]),
                        .bias = floats(a[5]),
                        .output = floats(a[6])};
    int64_t most = CHUNK_BYTES / (4 * args.in_size), chunks;
    most = most < 24 ? 24 : most;
    chunks = (args.rows + most - 1) / most;
    args.chunk_rows = chunks > 0 ? (args.rows + chunks - 1) / chunks : 1;
    PyThreadState *state = unlock(args.rows * args.in_size * args.out_size);
    chosen->linear(&args);
    lock(state);
    return 0;
}

/* integers [out_size][groups][GROUP_DEPTH * bits / 8], as GroupedMatrix has them; scales, zeros
 * [out_size][groups]; zeros may be NULL. */
static void pack_row(const uint8_t *integers, int bits, const float *scales, const float *zeros,
                     int64_t groups, int column, uint8_t *panel) {
    for (int64_t g = 0; g < groups; g++, panel += group_bytes(bits)) {
        float *terms = (float *)panel;
        terms[column] = scales[g];
        terms[PANEL + column] = zeros ? -zeros[g] * scales[g] : 0.0f;
        const uint8_t *from = integers + g * GROUP_DEPTH * bits / 8;
        for (int k = 0; k < GROUP_DEPTH; k++) {
            uint8_t *quad = panel + TERMS_BYTES + k / 4 * (PANEL * bits / 2) + k % 4;
            if (bits == 8)
                quad[column * 4] = from[k] ^ 128;
            else
                quad[column % (PANEL / 2) * 4] |= (from[k / 2] >> (k % 2 * 4) & 15)
                                                  << (column / (PANEL / 2) * 4);
        }
    }
}

OPERATION(pack_grouped) {
    const uint8_t *integers = (const uint8_t *)floats(a[0]);
    int bits = (int)integer(a[1]);
    const float *scales = floats(a[2]), *zeros = floats(a[3]);
    int64_t out_size = integer(a[4]), groups = integer(a[5]);
    uint8_t *panels = (uint8_t *)floats(a[6]);
    int64_t row_bytes = groups * GROUP_DEPTH * bits / 8, size = groups * group_bytes(bits);
    memset(panels, 0, (size_t)((out_size + PANEL - 1) / PANEL * size));
    for (int64_t n = 0; n < out_size; n++)
        pack_row(integers + n * row_bytes, bits, scales + n * groups, zeros ? zeros + n * groups : NULL,
                 groups, (int)(n % PANEL), panels + n / PANEL * size);
    return 0;
}

OPERATION(linear_grouped) {
    grouped_args args = {.input = floats(a[0]),
                         .rows = integer(a[1]),
                         .groups = integer(a[2]),
                         .out_size = integer(a[3]),
                         .bits = (int)integer(a[4]),
                         .panels = (const uint8_t *)floats(a[5]),
                         .bias = floats(a[6]),
                         .output = floats(a[7]),
                         .activation_bits = (int)integer(a[8])};
    PyThreadState *state = unlock(args.rows * args.groups * GROUP_DEPTH * args.out_size);
    int failed = chosen->grouped(&args);
    lock(state);
    return failed;
}

OPERATION(norm) {
    norm_args args = {.hidden = floats(a[0]),
                      .residual = floats(a[1]),
                      .weight = floats(a[2]),
                      .rows = integer(a[3]),
                      .size = integer(a[4]),
                      .epsilon = number(a[5]),
                      .normed = floats(a[6]),
                      .total = floats(a[7])};
    chosen->norm(&args);
    return 0;
}

OPERATION(gate) {
    gate_args args = {floats(a[0]), integer(a[1]), integer(a[2]), floats(a[3])};
    chosen->gate(&args);
    return 0;
}

OPERATION(rotary) {
    rotary_args args = {.heads = floats(a[0]),
                        .tokens = integer(a[1]),
                        .num_heads = integer(a[2]),
                        .num_kv_heads = integer(a[3]),
                        .head_dim = integer(a[4]),
                        .block_size = integer(a[5]),
                        .rotations = floats(a[6]),
                        .slots = integers(a[7]),
                        .keys = floats(a[8]),
                        .values = floats(a[9]),
                        .query = floats(a[10])};
    chosen->rotary(&args);
    return 0;
}

OPERATION(attention) {
    attention_args args = {.query = floats(a[0]),
                           .tokens = integer(a[1]),
                           .num_heads = integer(a[2]),
                           .num_kv_heads = integer(a[3]),
                           .head_dim = integer(a[4]),
                           .block_size = integer(a[5]),
                           .keys = floats(a[6]),
                           .values = floats(a[7]),
                           .rows = integer(a[8]),
                           .query_begins = integers(a[9]),
                           .context_lens = integers(a[10]),
                           .block_indices = integers(a[11]),
                           .block_begins = integers(a[12]),
                           .scale = number(a[13]),
                           .soft_cap = number(a[15]),
                           .output = floats(a[16])};
    int64_t window = integer(a[14]);
    args.window = window > 0 ? window : INT64_MAX;
    return chosen->attention(&args);
}

OPERATION(argmax) {
    argmax_args args = {floats(a[0]), integer(a[1]), integer(a[2]), integers(a[3])};
    chosen->argmax(&args);
    return 0;
}

OPERATION(gumbel) {
    gumbel_args args = {.logits = floats(a[0]),
                        .rows = integer(a[1]),
                        .size = integer(a[2]),
                        .temperatures = floats(a[3]),
                        .seeds = integers(a[4]),
                        .positions = integers(a[5]),
                        .samples = integers(a[6]),
                        .places = integers(a[7])};
    return chosen->gumbel(&args);
}

/* -- calls and programs ----------------------------------------------------------------------------- */

/* What each operation takes, a letter per argument:
 *   r  address of what a forward computes or brings and the operation reads; 0: nothing
 *   w  address of what the operation computes; 0: nothing
 *   k  address of what outlives forwards: weights, caches; 0: nothing
 *   t  how many rows r and w have: a multiple of the forward's tokens
 *   b  a number that the forward brings: sequences
 *   n  a number of the model's
 *   x  the same, in floating point */
#define OPERATIONS(EACH)                                                                                  \
    EACH(pack, "knnk")                                                                                    \
    EACH(pack_grouped, "knkknnk")                                                                         \
    EACH(linear, "rtnnkkw")                                                                               \
    EACH(linear_grouped, "rtnnnkkwn")                                                                     \
    EACH(norm, "rrktnxww")                                                                                \
    EACH(gate, "rtnw")                                                                                    \
    EACH(rotary, "rtnnnnrrkkw")                                                                           \
    EACH(attention, "rtnnnnkkbrrrrxnxw")                                                                  \
    EACH(argmax, "rtnw")                                                                                  \
    EACH(gumbel, "rtnrrrrw")

static int check_count(const char *name, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
    return count == wanted;
}

#define FUNCTION(name) static PyObject *name(PyObject *self, PyObject *const *a, Py_ssize_t count)
#define WANT(name, wanted)                                                                                \
    (void)self;                                                                                           \
    if (!check_count(name, count, wanted))                                                                \
    return NULL

typedef struct {
    const char *name, *takes;
    int (*run)(const word *);
} operation;

#define ROW(name, takes) {#name, takes, run_##name},
static const operation table[] = {OPERATIONS(ROW){NULL, NULL, NULL}};
#define INDEX(name, takes) INDEX_##name,
enum { OPERATIONS(INDEX) };

static PyObject *call(const operation *called, PyObject *const *given, Py_ssize_t count) {
    word words[MOST_ARGUMENTS];
    if (!check_count(called->name, count, (Py_ssize_t)strlen(called->takes)))
        return NULL;
    for (int i = 0; called->takes[i]; i++)
        if (called->takes[i] == 'x')
            words[i].number = PyFloat_AsDouble(given[i]);
        else
            words[i].integer = PyLong_AsLongLong(given[i]);
    if (PyErr_Occurred())
        return NULL;
    if (called->run(words))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

#define CALL(name, takes)                                                                                 \
    FUNCTION(py_##name) {                                                                                 \
        (void)self;                                                                                       \
        return call(&table[INDEX_##name], a, count);                                                      \
    }
OPERATIONS(CALL)

/* {name: (index, takes)} */
static PyObject *described(void) {
    PyObject *all = PyDict_New();
    for (int i = 0; all && table[i].name; i++) {
        PyObject *one = Py_BuildValue("is", i, table[i].takes);
        if (!one || PyDict_SetItemString(all, table[i].name, one))
            Py_CLEAR(all);
        Py_XDECREF(one);
    }
    return all;
}

/* Where a program's argument comes from; ../recorded.py writes them. */
enum { CONSTANT, PER_TOKEN, IN_ARENA, GIVEN };

typedef struct {
    const int64_t *words; /* per operation its index in `table`, then per argument a source and a value */
    int64_t count;        /* of words */
    int64_t tokens;
    char *arena;          /* of what operations compute for later ones */
    const int64_t *given; /* numbers and addresses of this forward */
} program;

static word resolve(const program *run, int64_t source, int64_t value) {
    word word = {.integer = value};
    if (source == PER_TOKEN)
        word.integer = value * run->tokens;
    else if (source == IN_ARENA)
        word.address = run->arena + value * run->tokens;
    else if (source == GIVEN)
        word.integer = run->given[value];
    return word;
}

static int run_program(const program *run) {
    word words[MOST_ARGUMENTS];
    for (const int64_t *at = run->words, *end = at + run->count; at < end;) {
        const operation *next = &table[*at++];
        for (int i = 0; next->takes[i]; i++, at += 2)
            words[i] = resolve(run, at[0], at[1]);
        if (next->run(words))
            return -1;
    }
    return 0;
}

FUNCTION(py_replay) {
    WANT("replay", 5);
    program run = {.words = PyLong_AsVoidPtr(a[0]),
                   .count = PyLong_AsLongLong(a[1]),
                   .tokens = PyLong_AsLongLong(a[2]),
                   .arena = PyLong_AsVoidPtr(a[3]),
                   .given = PyLong_AsVoidPtr(a[4])};
    if (PyErr_Occurred())
        return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_program(&run);
    Py_END_ALLOW_THREADS
    return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

/* -- checks ----------------------------------------------------------------------------------------- */

/* What is wrong with the rows of a forward: 0 nothing, 1 a block that the cache lacks, 2 a short table. */
FUNCTION(py_fault_of_rows) {
    WANT("fault_of_rows", 8);
    const int64_t *begins = PyLong_AsVoidPtr(a[0]), *contexts = PyLong_AsVoidPtr(a[1]);
    const int64_t *blocks = PyLong_AsVoidPtr(a[2]), *tables = PyLong_AsVoidPtr(a[3]);
    int64_t rows = PyLong_AsLongLong(a[4]), indices = PyLong_AsLongLong(a[5]);
    int64_t num_blocks = PyLong_AsLongLong(a[6]), block_size = PyLong_AsLongLong(a[7]);
    if (PyErr_Occurred())
        return NULL;
    for (int64_t i = 0; i < indices; i++)
        if (blocks[i] < 0 || blocks[i] >= num_blocks)
            return PyLong_FromLong(1);
    for (int64_t i = 0; i < rows; i++) {
        int64_t queries = begins[i + 1] - begins[i], length = tables[i + 1] - tables[i];
        if (queries > 0 && contexts[i] + queries > length * block_size)
            return PyLong_FromLong(2);
    }
    return PyLong_FromLong(0);
}

/* -- settings --------------------------------------------------------------------------------------- */

FUNCTION(py_set_threads) {
    WANT("set_threads", 1);
    long long threads = PyLong_AsLongLong(a[0]);
    if (PyErr_Occurred())
        return NULL;
    if (threads < 1 || threads > POOL_MAX_MEMBERS)
        return PyErr_Format(PyExc_ValueError, "threads is %lld, not 1 to %d", threads, POOL_MAX_MEMBERS);
    pool_set_members((int)threads);
    Py_RETURN_NONE;
}

FUNCTION(py_instruction_sets) {
    WANT("instruction_sets", 0);
    (void)a;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && sets[i]; i++) {
        PyObject *name = PyUnicode_FromString(sets[i]->name);
        if (!name || PyList_Append(names, name))
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

FUNCTION(py_use_instruction_set) {
    WANT("use_instruction_set", 1);
    const char *name = PyUnicode_AsUTF8(a[0]);
    if (!name)
        return NULL;
    for (int i = 0; sets[i]; i++)
        if (!strcmp(sets[i]->name, name)) {
            chosen = sets[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no instruction set %s", name);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

#define ENTRY(name, takes) METHOD(name),

static PyMethodDef methods[] = {OPERATIONS(ENTRY) METHOD(replay),
                                METHOD(fault_of_rows),
                                METHOD(set_threads),
                                METHOD(instruction_sets),
                                METHOD(use_instruction_set),
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods,
                                        NULL,                  NULL,      NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    find_sets();
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "PANEL", PANEL) ||
                   PyModule_AddIntConstant(module, "GROUP_BYTES_4", group_bytes(4)) ||
                   PyModule_AddIntConstant(module, "GROUP_BYTES_8", group_bytes(8))))
        Py_CLEAR(module);
    PyObject *all = module ? described() : NULL;
    if (module && (!all || PyModule_AddObjectRef(module, "OPERATIONS", all)))
        Py_CLEAR(module);
    Py_XDECREF(all);
    return module;
}
