/* The operations on float32, once per instruction set. All arrays are dense unless a stride is given. */
#ifndef OCTAVO_OPERATIONS_H
#define OCTAVO_OPERATIONS_H

#include <stdint.h>

/* Columns of a panel of packed weights: a panel is [in_size][PANEL], the last one padded with zeros. */
#define PANEL 32

/* Positions that one piece of a decode attends to. A fixed length: what a row gets does not depend on
 * which rows are beside it. */
#define SEGMENT 256

typedef struct {
    const float *input; /* [rows][in_size] */
    int64_t rows, in_size, out_size;
    const float *panels; /* [ceil(out_size / PANEL)][in_size][PANEL] */
    const float *bias;   /* [out_size] or NULL */
    float *output;       /* [rows][out_size] */
    int64_t chunk_rows;  /* rows that stay in a cache while panels pass */
} linear_args;

/* Weights in integers of `bits` 4 or 8. A group of a panel is [PANEL] scales, [PANEL] offsets, then for each of
 * GROUP_DEPTH / 4 quads of steps the integers of its columns, four of a column side by side. Of 4 bits, a
 * byte holds those of columns c and PANEL / 2 + c; of 8, the integer with 128 added. */
#define GROUP_DEPTH 32
#define TERMS_BYTES (2 * PANEL * 4)

static inline int64_t group_bytes(int bits) { return TERMS_BYTES + GROUP_DEPTH * PANEL * bits / 8; }

typedef struct {
    const float *input;          /* [rows][groups * GROUP_DEPTH] */
    int64_t rows, groups, out_size;
    int bits;
    const uint8_t *panels; /* [ceil(out_size / PANEL)][groups] of group_bytes(bits) */
    const float *bias;     /* [out_size] or NULL */
    float *output;         /* [rows][out_size] */
    int activation_bits;   /* 32: floats; 16 or 8: rounded first, each group of a row by its largest */
} grouped_args;

typedef struct {
    const float *hidden, *residual; /* [rows][size]; residual may be NULL */
    const float *weight;            /* [size] */
    int64_t rows, size;
    float epsilon;
    float *normed, *total; /* [rows][size]; total is written where there is a residual */
} norm_args;

typedef struct {
    const float *gate_up; /* [rows][2 * size] */
    int64_t rows, size;
    float *output; /* [rows][size] */
} gate_args;

typedef struct {
    const float *heads; /* per token: queries, keys, values, each [head_dim] */
    int64_t tokens, num_heads, num_kv_heads, head_dim, block_size;
    const float *rotations; /* [tokens][head_dim], cosines then sines */
    const int64_t *slots;   /* [tokens]; negative: not stored */
    float *keys, *values;   /* caches: [num_blocks][num_kv_heads][block_size][head_dim] */
    float *query;           /* [tokens][num_heads][head_dim] */
} rotary_args;

typedef struct {
    const float *query; /* [tokens][num_heads][head_dim] */
    int64_t tokens, num_heads, num_kv_heads, head_dim, block_size;
    const float *keys, *values; /* caches, as above */
    int64_t rows;
    const int64_t *query_begins, *context_lens, *block_indices, *block_begins;
    float scale;
    int64_t window; /* INT64_MAX: none */
    float soft_cap; /* 0: none */
    float *output;  /* as query; tokens outside all rows get zeros */
} attention_args;

typedef struct {
    const float *values; /* [rows][size], size > 0 */
    int64_t rows, size;
    int64_t *places; /* [rows] */
} argmax_args;

typedef struct {
    const float *logits; /* [rows][size], size > 0 */
    int64_t rows, size;
    const float *temperatures;                   /* [rows], above 0 */
    const int64_t *seeds, *positions, *samples; /* [rows] */
    int64_t *places;                             /* [rows] */
} gumbel_args;

typedef struct {
    const char *name;
    void (*linear)(const linear_args *);
    int (*grouped)(const grouped_args *); /* 0, or -1: no memory */
    void (*norm)(const norm_args *);
    void (*gate)(const gate_args *);
    void (*rotary)(const rotary_args *);
    int (*attention)(const attention_args *); /* 0, or -1: no memory */
    void (*argmax)(const argmax_args *);
    int (*gumbel)(const gumbel_args *); /* 0, or -1: no memory */
} operations;

extern const operations operations_generic;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_SETS 1
extern const operations operations_avx2, operations_avx512, operations_avx512vnni;
#endif

#endif
