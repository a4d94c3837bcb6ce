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

static int check_count(const char *name, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
    return count == wanted;
}

/* Errors are looked for once, after all arguments: PyErr_Occurred. */
static int64_t integer(PyObject *value) { return PyLong_AsLongLong(value); }
static float *floats(PyObject *value) { return PyLong_AsVoidPtr(value); }
static int64_t *integers(PyObject *value) { return PyLong_AsVoidPtr(value); }
static float number(PyObject *value) { return (float)PyFloat_AsDouble(value); }

#define FUNCTION(name) static PyObject *name(PyObject *self, PyObject *const *a, Py_ssize_t count)
#define WANT(name, wanted)                                                                                \
    (void)self;                                                                                           \
    if (!check_count(name, count, wanted))                                                                \
    return NULL

/* -- operations ------------------------------------------------------------------------------------- */

FUNCTION(py_pack) {
    WANT("pack", 4);
    const float *weight = floats(a[0]);
    int64_t out_size = integer(a[1]), in_size = integer(a[2]);
    float *panels = floats(a[3]);
    if (PyErr_Occurred())
        return NULL;
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
    Py_RETURN_NONE;
}

FUNCTION(py_linear) {
    WANT("linear", 7);
    linear_args args = {.input = floats(a[0]),
                        .rows = integer(a[1]),
                        .in_size = integer(a[2]),
                        .out_size = integer(a[3]),
                        .panels = floats(a[4]),
                        .bias = floats(a[5]),
                        .output = floats(a[6])};
    if (PyErr_Occurred())
        return NULL;
    int64_t most = CHUNK_BYTES / (4 * args.in_size), chunks;
    most = most < 24 ? 24 : most;
    chunks = (args.rows + most - 1) / most;
    args.chunk_rows = chunks > 0 ? (args.rows + chunks - 1) / chunks : 1;
    if (args.rows * args.in_size * args.out_size > LONG_PRODUCT) {
        Py_BEGIN_ALLOW_THREADS
        chosen->linear(&args);
        Py_END_ALLOW_THREADS
    } else {
        chosen->linear(&args);
    }
    Py_RETURN_NONE;
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

FUNCTION(py_pack_grouped) {
    WANT("pack_grouped", 7);
    const uint8_t *integers = (const uint8_t *)floats(a[0]);
    int bits = (int)integer(a[1]);
    const float *scales = floats(a[2]), *zeros = floats(a[3]);
    int64_t out_size = integer(a[4]), groups = integer(a[5]);
    uint8_t *panels = (uint8_t *)floats(a[6]);
    if (PyErr_Occurred())
        return NULL;
    int64_t row_bytes = groups * GROUP_DEPTH * bits / 8, size = groups * group_bytes(bits);
    memset(panels, 0, (size_t)((out_size + PANEL - 1) / PANEL * size));
    for (int64_t n = 0; n < out_size; n++)
        pack_row(integers + n * row_bytes, bits, scales + n * groups, zeros ? zeros + n * groups : NULL,
                 groups, (int)(n % PANEL), panels + n / PANEL * size);
    Py_RETURN_NONE;
}

FUNCTION(py_linear_grouped) {
    WANT("linear_grouped", 9);
    grouped_args args = {.input = floats(a[0]),
                         .rows = integer(a[1]),
                         .groups = integer(a[2]),
                         .out_size = integer(a[3]),
                         .bits = (int)integer(a[4]),
                         .panels = (const uint8_t *)floats(a[5]),
                         .bias = floats(a[6]),
                         .output = floats(a[7]),
                         .activation_bits = (int)integer(a[8])};
    int failed;
    if (PyErr_Occurred())
        return NULL;
    if (args.rows * args.groups * GROUP_DEPTH * args.out_size > LONG_PRODUCT) {
        Py_BEGIN_ALLOW_THREADS
        failed = chosen->grouped(&args);
        Py_END_ALLOW_THREADS
    } else {
        failed = chosen->grouped(&args);
    }
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

FUNCTION(py_norm) {
    WANT("norm", 8);
    norm_args args = {.hidden = floats(a[0]),
                      .residual = floats(a[1]),
                      .weight = floats(a[2]),
                      .rows = integer(a[3]),
                      .size = integer(a[4]),
                      .epsilon = number(a[5]),
                      .normed = floats(a[6]),
                      .total = floats(a[7])};
    if (PyErr_Occurred())
        return NULL;
    chosen->norm(&args);
    Py_RETURN_NONE;
}

FUNCTION(py_gate) {
    WANT("gate", 4);
    gate_args args = {floats(a[0]), integer(a[1]), integer(a[2]), floats(a[3])};
    if (PyErr_Occurred())
        return NULL;
    chosen->gate(&args);
    Py_RETURN_NONE;
}

FUNCTION(py_rotary) {
    WANT("rotary", 11);
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
    if (PyErr_Occurred())
        return NULL;
    chosen->rotary(&args);
    Py_RETURN_NONE;
}

FUNCTION(py_attention) {
    WANT("attention", 17);
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
    if (PyErr_Occurred())
        return NULL;
    if (chosen->attention(&args))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

FUNCTION(py_argmax) {
    WANT("argmax", 4);
    argmax_args args = {floats(a[0]), integer(a[1]), integer(a[2]), integers(a[3])};
    if (PyErr_Occurred())
        return NULL;
    chosen->argmax(&args);
    Py_RETURN_NONE;
}

/* -- settings --------------------------------------------------------------------------------------- */

FUNCTION(py_set_threads) {
    WANT("set_threads", 1);
    int64_t threads = integer(a[0]);
    if (PyErr_Occurred())
        return NULL;
    if (threads < 1 || threads > POOL_MAX_MEMBERS)
        return PyErr_Format(PyExc_ValueError, "threads is %lld, not 1 to %d", (long long)threads,
                            POOL_MAX_MEMBERS);
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

static PyMethodDef methods[] = {METHOD(pack),
                                METHOD(linear),
                                METHOD(pack_grouped),
                                METHOD(linear_grouped),
                                METHOD(norm),
                                METHOD(gate),
                                METHOD(rotary),
                                METHOD(attention),
                                METHOD(argmax),
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
    return module;
}
