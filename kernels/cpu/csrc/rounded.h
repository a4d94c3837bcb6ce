/* Products of weights in small integers with activations that are rounded to integers first: each group of
 * GROUP_DEPTH of a row by its largest magnitude, to 16 bits in two digits or to 8 in one.
 *
 *     sum of w x = scale of x * (scale of w * sum of integers + offset of w * sum of x's integers)
 *
 * Within a group all is exact, so what a row gets does not depend on the rows beside it. */

#define MOST_SUMS 12 /* pairs of accumulators of a tile: rows * digits */
#define QUADS (GROUP_DEPTH / 4)

/* Where the processor has no instruction for it: lane += the four products of a lane's bytes. */
#ifndef DOT_BYTES
INLINE ivec dot_bytes(ivec sum, ivec unsigned_bytes, ivec signed_bytes) {
    UNROLL for (int k = 0; k < 4; k++)
        sum += ((unsigned_bytes >> (8 * k)) & 255) * ((signed_bytes << (24 - 8 * k)) >> 24);
    return sum;
}
#define DOT_BYTES dot_bytes
#endif

/* Of the rows of one tile, which a panel is multiplied with at once. */
typedef struct {
    float scale, sum; /* the latter of the integers */
    int32_t shift;    /* 128 times that sum */
} rounded_terms;

typedef struct {
    const grouped_args *args;
    int digits;
    int64_t tiles, tiles_at_once; /* the latter stay in a cache while panels pass */
    uint8_t *bytes;       /* of each tile [groups][QUADS][digits][rows][4], the higher digit first */
    rounded_terms *terms; /* of each tile [groups][rows] */
} rounded_task;

static int64_t first_row(const rounded_task *task, int64_t tile) {
    return task->args->rows * tile / task->tiles;
}

/* -- rounding --------------------------------------------------------------------------------------- */

typedef int8_t digit_bytes __attribute__((vector_size(WIDTH)));

INLINE void store_digits(ivec digits, int64_t stride, uint8_t *to) {
    digit_bytes narrow = __builtin_convertvector(digits, digit_bytes);
    UNROLL for (int i = 0; i < WIDTH / 4; i++) memcpy(to + i * stride, (char *)&narrow + 4 * i, 4);
}

INLINE float magnitude(const float *x) {
    vec found = {0}, spoilt = {0};
    for (int i = 0; i < GROUP_DEPTH; i += WIDTH) {
        vec value = load(x + i);
        found = larger(found, larger(value, -value));
        spoilt += value * all(0.0f); /* not 0 where one is infinite or no number */
    }
    return largest_lane(found) + sum(spoilt);
}

/* One group of one row of a tile of `height` rows. */
INLINE rounded_terms round_group(const int digits, const float *x, int64_t height, uint8_t *to) {
    const float range = digits == 2 ? 127 * 256 : 127;
    const vec shift = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    float largest = magnitude(x), factor = largest > 1e-30f ? range / largest : 0; /* no overflow */
    int64_t quad = 4 * digits * height; /* bytes */
    ivec total = {0};
    for (int i = 0; i < GROUP_DEPTH; i += WIDTH, to += WIDTH / 4 * quad) {
        ivec value = (ivec)(load(x + i) * all(factor) + shift) - (ivec)shift;
        total += value;
        if (digits == 2) {
            ivec high = (value + 128) >> 8;
            store_digits(high, quad, to);
            store_digits(value - (high << 8), quad, to + 4 * height);
        } else {
            store_digits(value, quad, to);
        }
    }
    float count = sum(__builtin_convertvector(total, vec)); /* exact: below 2^24 */
    return (rounded_terms){largest / range, count, 128 * (int32_t)count};
}

static void round_tile(const void *opaque, int64_t tile, int member) {
    (void)member;
    const rounded_task *task = opaque;
    int64_t groups = task->args->groups, depth = groups * GROUP_DEPTH;
    int64_t first = first_row(task, tile), height = first_row(task, tile + 1) - first;
    uint8_t *bytes = task->bytes + first * depth * task->digits;
    rounded_terms *terms = task->terms + first * groups;
    const float *x = task->args->input + first * depth;
    for (int64_t r = 0; r < height; r++, x += depth)
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = bytes + (g * QUADS * task->digits * height + r) * 4;
            terms[g * height + r] = task->digits == 2 ? round_group(2, x + g * GROUP_DEPTH, height, to)
                                                      : round_group(1, x + g * GROUP_DEPTH, height, to);
        }
}

/* -- products --------------------------------------------------------------------------------------- */

/* One group: sums [rows][PANEL] += its part. */
INLINE void rounded_group(const int rows, const int bits, const int digits, const uint8_t *group,
                          int column, const uint8_t *bytes, const rounded_terms *terms, float *sums) {
    ivec found[MOST_SUMS][2];
    UNROLL for (int i = 0; i < rows * digits; i++) found[i][0] = found[i][1] = (ivec){0};
    const uint8_t *quad = group + TERMS_BYTES;
    for (int q = 0; q < QUADS; q++, quad += PANEL * bits / 2, bytes += 4 * rows * digits) {
        ivec halves[2];
        load_quad(bits, quad, column, halves);
        UNROLL for (int i = 0; i < rows * digits; i++) {
            int32_t four;
            memcpy(&four, bytes + 4 * i, 4);
            ivec x = four - (ivec){0};
            UNROLL for (int v = 0; v < 2; v++) found[i][v] = DOT_BYTES(found[i][v], halves[v], x);
        }
    }
    group_terms weight = load_terms(group, column);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2; v++) {
            ivec total = digits == 2 ? (found[r][v] << 8) + found[rows + r][v] : found[r][v];
            if (bits == 8)
                total -= terms[r].shift;
            float *to = sums + r * PANEL + v * HALF_PANEL + column;
            vec part = __builtin_convertvector(total, vec) * weight.scales[v]
                       + all(terms[r].sum) * weight.offsets[v];
            store(to, load(to) + all(terms[r].scale) * part);
        }
}

typedef void (*rounded_function)(int64_t groups, const uint8_t *panel, int fetches, const uint8_t *bytes,
                                 const rounded_terms *terms, float *sums);

#define ROUNDED(rows, bits, digits)                                                                       \
    static void rounded_##rows##_##bits##_##digits(int64_t groups, const uint8_t *panel, int fetches,     \
                                                   const uint8_t *bytes, const rounded_terms *terms,      \
                                                   float *sums) {                                         \
        int64_t size = group_bytes(bits);                                                                 \
        for (int64_t g = 0; g < groups; g++, panel += size) {                                             \
            for (int64_t line = 0; fetches && line < size; line += 64)                                    \
                __builtin_prefetch(panel + 4 * size + line, 0, 2);                                        \
            for (int column = 0; column < HALF_PANEL; column += WIDTH)                                    \
                rounded_group(rows, bits, digits, panel, column, bytes, terms, sums);                     \
            bytes += GROUP_DEPTH * digits * rows;                                                         \
            terms += rows;                                                                                \
        }                                                                                                 \
    }

#define ROUNDED_OF_EACH(rows)                                                                             \
    ROUNDED(rows, 4, 1) ROUNDED(rows, 4, 2) ROUNDED(rows, 8, 1) ROUNDED(rows, 8, 2)

ROUNDED_OF_EACH(1)
ROUNDED_OF_EACH(2)
ROUNDED_OF_EACH(3)
ROUNDED_OF_EACH(4)
ROUNDED_OF_EACH(5)
ROUNDED_OF_EACH(6)

#define ROUNDED_TILES(bits, digits)                                                                       \
    {NULL, rounded_1_##bits##_##digits, rounded_2_##bits##_##digits,            \
     rounded_3_##bits##_##digits, rounded_4_##bits##_##digits, rounded_5_##bits##_##digits,               \
     rounded_6_##bits##_##digits}

#define ROUNDED_ROWS 6

static const rounded_function rounded_tiles[2][2][ROUNDED_ROWS + 1] = {
    {ROUNDED_TILES(4, 1), ROUNDED_TILES(4, 2)}, {ROUNDED_TILES(8, 1), ROUNDED_TILES(8, 2)}};

static void rounded_panel(const rounded_task *task, int64_t tile, int64_t panel, int fetches) {
    const grouped_args *args = task->args;
    float sums[ROUNDED_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t groups = args->groups, first = first_row(task, tile), rows = first_row(task, tile + 1) - first;
    start_sums(args, panel, rows, sums);
    rounded_tiles[args->bits == 8][task->digits - 1][rows](
        groups, args->panels + panel * groups * group_bytes(args->bits), fetches,
        task->bytes + first * groups * GROUP_DEPTH * task->digits, task->terms + first * groups, sums);
    put_sums(args, panel, first, rows, sums);
}

static void rounded_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const rounded_task *task = opaque;
    int64_t panels = (task->args->out_size + PANEL - 1) / PANEL;
    int64_t tile = item / panels * task->tiles_at_once, panel = item % panels;
    for (int64_t i = 0; i < task->tiles_at_once && tile + i < task->tiles; i++)
        rounded_panel(task, tile + i, panel, i == 0);
}

#define CHUNK_TILES 16
#define FEW_FLOATS 16384 /* are rounded sooner than threads have shared the work */

static int rounded(const grouped_args *args) {
    int64_t groups = args->groups, panels = (args->out_size + PANEL - 1) / PANEL;
    rounded_task task = {.args = args, .digits = args->activation_bits / 8};
    task.tiles = (args->rows + ROUNDED_ROWS - 1) / ROUNDED_ROWS;
    task.tiles_at_once = task.tiles < CHUNK_TILES ? task.tiles : CHUNK_TILES;
    int64_t floats = args->rows * groups * GROUP_DEPTH;
    if (!floats)
        return 0;
    task.bytes = malloc((size_t)(floats * task.digits));
    task.terms = malloc((size_t)(args->rows * groups) * sizeof *task.terms);
    int failed = !task.bytes || !task.terms;
    if (!failed) {
        if (floats <= FEW_FLOATS)
            for (int64_t tile = 0; tile < task.tiles; tile++)
                round_tile(&task, tile, 0);
        else
            pool_run(round_tile, &task, task.tiles);
        pool_run(rounded_item, &task, (task.tiles + task.tiles_at_once - 1) / task.tiles_at_once * panels);
    }
    free(task.bytes);
    free(task.terms);
    return failed ? -1 : 0;
}

static int grouped(const grouped_args *args) {
    if (args->activation_bits < 32)
        return rounded(args);
    multiply_grouped(args);
    return 0;
}
