/* Products with weights in small integers: value = integer * scale + offset, a scale and an offset for each
 * column and GROUP_DEPTH steps of depth. Few rows use a panel's values as they are unpacked; for more
 * rows a part of the panel is unpacked into the first-level cache. Both give the same bits. */

/* Most rows of a tile of the first way, whose sums stay in registers, and of the first way itself, which
 * unpacks once for each tile. */
#if TILE_ROWS >= 12
#define FUSED_ROWS 10
#define FEW_ROWS 16
#else
#define FUSED_ROWS 4
#define FEW_ROWS 4
#endif
#define PART_GROUPS 4 /* groups of the second way's part */

#define HALF_PANEL (PANEL / 2)

INLINE ivec load_integers(const uint8_t *from) {
    ivec value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Four steps of depth of columns `column` .. of the panel's first half, and of the same of its second: in
 * each lane a column's four integers, of 8 bits with 128 added. */
INLINE void load_quad(const int bits, const uint8_t *quad, int column, ivec halves[2]) {
    ivec first = load_integers(quad + 4 * column);
    if (bits == 4) {
        halves[0] = first & 0x0f0f0f0f;
        halves[1] = (first >> 4) & 0x0f0f0f0f;
    } else {
        halves[0] = first;
        halves[1] = load_integers(quad + 4 * (HALF_PANEL + column));
    }
}

/* Step `k` of a quad. */
INLINE vec step_of(const int bits, ivec quad, int k) {
    ivec value = (quad >> (8 * k)) & 255;
    return __builtin_convertvector(bits == 4 ? value : value - 128, vec);
}

typedef struct {
    vec scales[2], offsets[2];
} group_terms;

INLINE group_terms load_terms(const uint8_t *group, int column) {
    const float *scales = (const float *)group, *offsets = scales + PANEL;
    group_terms terms = {{load(scales + column), load(scales + HALF_PANEL + column)},
                         {load(offsets + column), load(offsets + HALF_PANEL + column)}};
    return terms;
}

/* Adds to what the sums [rows][PANEL] hold. */
INLINE void fused_tile(const int rows, const int bits, int64_t groups, const float *input,
                       const uint8_t *panel, int column, float *output) {
    int64_t size = group_bytes(bits), depth = groups * GROUP_DEPTH;
    vec sums[FUSED_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2; v++)
            sums[r][v] = load(output + r * PANEL + column + v * HALF_PANEL);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = panel + g * size, *step = group + TERMS_BYTES;
        const float *a = input + g * GROUP_DEPTH;
        group_terms terms = load_terms(group, column);
        for (int64_t line = 0; column == 0 && line < size; line += 64)
            __builtin_prefetch(group + 4 * size + line, 0, 2);
        for (int quad = 0; quad < GROUP_DEPTH; quad += 4, step += PANEL * bits / 2) {
            ivec halves[2];
            load_quad(bits, step, column, halves);
            UNROLL for (int k = 0; k < 4; k++)
                UNROLL for (int v = 0; v < 2; v++) {
                    vec values = step_of(bits, halves[v], k) * terms.scales[v] + terms.offsets[v];
                    UNROLL for (int r = 0; r < rows; r++) sums[r][v] += all(a[r * depth + quad + k]) * values;
                }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2; v++) store(output + r * PANEL + column + v * HALF_PANEL, sums[r][v]);
}

typedef void (*fused_function)(int64_t groups, const float *input, const uint8_t *panel, float *sums);

#define FUSED(rows, bits)                                                                                 \
    static void fused_##rows##_##bits(int64_t groups, const float *input, const uint8_t *panel,           \
                                      float *sums) {                                                      \
        for (int column = 0; column < HALF_PANEL; column += WIDTH)                                        \
            fused_tile(rows, bits, groups, input, panel, column, sums);                                   \
    }
#define FUSED_OF_BOTH(rows) FUSED(rows, 4) FUSED(rows, 8)

FUSED_OF_BOTH(1)
FUSED_OF_BOTH(2)
FUSED_OF_BOTH(3)
FUSED_OF_BOTH(4)
#if FUSED_ROWS > 4
FUSED_OF_BOTH(5)
FUSED_OF_BOTH(6)
FUSED_OF_BOTH(7)
FUSED_OF_BOTH(8)
FUSED_OF_BOTH(9)
FUSED_OF_BOTH(10)
#define FUSED_TILES(bits)                                                                                 \
    {NULL,           fused_1_##bits, fused_2_##bits, fused_3_##bits, fused_4_##bits, fused_5_##bits,      \
     fused_6_##bits, fused_7_##bits, fused_8_##bits, fused_9_##bits, fused_10_##bits}
#else
#define FUSED_TILES(bits) {NULL, fused_1_##bits, fused_2_##bits, fused_3_##bits, fused_4_##bits}
#endif

static const fused_function fused_tiles[2][FUSED_ROWS + 1] = {FUSED_TILES(4), FUSED_TILES(8)};

static void multiply_fused(const grouped_args *args, const uint8_t *panel, float *sums) {
    int64_t tiles = (args->rows + FUSED_ROWS - 1) / FUSED_ROWS;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t first = args->rows * i / tiles, rows = args->rows * (i + 1) / tiles - first;
        const float *input = args->input + first * args->groups * GROUP_DEPTH;
        fused_tiles[args->bits == 8][rows](args->groups, input, panel, sums + first * PANEL);
    }
}

/* A group of a panel as floats [GROUP_DEPTH][PANEL]. */
INLINE void unpack_group(const int bits, const uint8_t *group, float *to) {
    int64_t size = group_bytes(bits);
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(group + 4 * size + line, 0, 2);
    for (int column = 0; column < HALF_PANEL; column += WIDTH) {
        group_terms terms = load_terms(group, column);
        const uint8_t *step = group + TERMS_BYTES;
        for (int quad = 0; quad < GROUP_DEPTH; quad += 4, step += PANEL * bits / 2) {
            ivec halves[2];
            load_quad(bits, step, column, halves);
            UNROLL for (int k = 0; k < 4; k++)
                UNROLL for (int v = 0; v < 2; v++)
                    store(to + (quad + k) * PANEL + v * HALF_PANEL + column,
                          step_of(bits, halves[v], k) * terms.scales[v] + terms.offsets[v]);
        }
    }
}

static void unpack_groups(int bits, const uint8_t *panel, int64_t count, float *to) {
    for (int64_t g = 0; g < count; g++, to += GROUP_DEPTH * PANEL)
        if (bits == 4)
            unpack_group(4, panel + g * group_bytes(4), to);
        else
            unpack_group(8, panel + g * group_bytes(8), to);
}

/* Rows first .. first + rows of one panel, into sums [rows][PANEL] that hold the bias. */
static void add_panel(const grouped_args *args, const uint8_t *panel, int64_t first, int64_t rows,
                      float *sums) {
    float part[PART_GROUPS * GROUP_DEPTH * PANEL] __attribute__((aligned(64)));
    int64_t depth = args->groups * GROUP_DEPTH;
    for (int64_t g = 0; g < args->groups; g += PART_GROUPS) {
        int64_t count = args->groups - g < PART_GROUPS ? args->groups - g : PART_GROUPS;
        unpack_groups(args->bits, panel + g * group_bytes(args->bits), count, part);
        multiply(args->input + first * depth + g * GROUP_DEPTH, depth, rows, count * GROUP_DEPTH, part, 0, 1,
                 1, sums, PANEL);
    }
}

#define SUM_ROWS 192 /* rows of sums that stay in the first-level cache: 24 KB */

/* Bytes of a panel's columns in a row of the output; the last panel may have fewer. */
INLINE size_t panel_bytes(const grouped_args *args, int64_t panel) {
    int64_t columns = args->out_size - panel * PANEL;
    return (size_t)(columns < PANEL ? columns : PANEL) * 4;
}

/* What the sums [rows][PANEL] of a panel begin with. */
static void start_sums(const grouped_args *args, int64_t panel, int64_t rows, float *sums) {
    float bias[PANEL] = {0};
    if (args->bias)
        memcpy(bias, args->bias + panel * PANEL, panel_bytes(args, panel));
    for (int64_t r = 0; r < rows; r++)
        memcpy(sums + r * PANEL, bias, sizeof bias);
}

/* Puts the sums of rows first .. into the output. */
static void put_sums(const grouped_args *args, int64_t panel, int64_t first, int64_t rows,
                     const float *sums) {
    for (int64_t r = 0; r < rows; r++)
        memcpy(args->output + (first + r) * args->out_size + panel * PANEL, sums + r * PANEL,
               panel_bytes(args, panel));
}

static void grouped_panel(const grouped_args *args, int64_t panel, int64_t first, int64_t rows) {
    float sums[SUM_ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *packed = args->panels + panel * args->groups * group_bytes(args->bits);
    start_sums(args, panel, rows, sums);
    if (args->rows <= FEW_ROWS)
        multiply_fused(args, packed, sums);
    else
        add_panel(args, packed, first, rows, sums);
    put_sums(args, panel, first, rows, sums);
}

static void grouped_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const grouped_args *args = opaque;
    int64_t panels = (args->out_size + PANEL - 1) / PANEL, chunks = (args->rows + SUM_ROWS - 1) / SUM_ROWS;
    int64_t chunk = item / panels, first = args->rows * chunk / chunks;
    grouped_panel(args, item % panels, first, args->rows * (chunk + 1) / chunks - first);
}

static void multiply_grouped(const grouped_args *args) {
    int64_t panels = (args->out_size + PANEL - 1) / PANEL, chunks = (args->rows + SUM_ROWS - 1) / SUM_ROWS;
    pool_run(grouped_item, args, chunks * panels);
}
