/* Products of a few rows with a panel: the accumulators of a tile stay in registers.
 *
 * Each output is one sum in the order of `depth`, so its bits do not depend on how many rows there are. */

#define TILE_COLUMNS (TILE_VECTORS * WIDTH)

typedef struct {
    int64_t depth;
    const float *a; /* [rows][depth], rows a_stride apart */
    int64_t a_stride;
    const float *b; /* [depth][PANEL], of which TILE_COLUMNS are used */
    const float *start; /* what the sums begin with; NULL: 0 */
    int64_t start_stride;
    float *c;
    int64_t c_stride;
    const char *ahead; /* memory to fetch into the cache meanwhile */
    int64_t ahead_step; /* bytes per step of depth */
} tile_args;

INLINE void tile(const int rows, const int lines, const tile_args *t) {
    vec sums[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            sums[r][v] = t->start ? load(t->start + r * t->start_stride + v * WIDTH) : (vec){0};
    const float *a = t->a, *b = t->b;
    const char *ahead = t->ahead;
    int64_t depth = t->depth, stride = t->a_stride, step = t->ahead_step;
    for (int64_t k = 0; k < depth; k++) {
        vec column[TILE_VECTORS];
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) column[v] = load(b + v * WIDTH);
        if (lines > 0)
            __builtin_prefetch(ahead, 0, 2);
        if (lines > 1)
            __builtin_prefetch(ahead + 64, 0, 2);
        UNROLL for (int r = 0; r < rows; r++) {
            vec x = all(a[r * stride]);
            UNROLL for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += x * column[v];
        }
        a++;
        b += PANEL;
        ahead += step;
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            store(t->c + r * t->c_stride + v * WIDTH, sums[r][v]);
}

typedef void (*tile_function)(const tile_args *);

#define TILE(rows)                                                                                        \
    static void stream_tile_##rows(const tile_args *t) { tile(rows, PANEL * 4 / 64 * TILE_COLUMNS / PANEL, t); } \
    static void tile_##rows(const tile_args *t) { tile(rows, 1, t); }                                     \
    static void plain_tile_##rows(const tile_args *t) { tile(rows, 0, t); }

TILE(1)
TILE(2)
TILE(3)
#if TILE_ROWS > 3
TILE(4)
TILE(5)
TILE(6)
#endif
#if TILE_ROWS > 6
TILE(7)
TILE(8)
TILE(9)
TILE(10)
TILE(11)
TILE(12)
#endif

#if TILE_ROWS == 3
#define TILES(kind) {NULL, kind##_1, kind##_2, kind##_3}
#elif TILE_ROWS == 6
#define TILES(kind) {NULL, kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6}
#else
#define TILES(kind)                                                                                       \
    {NULL,     kind##_1, kind##_2, kind##_3, kind##_4,  kind##_5,  kind##_6,                              \
     kind##_7, kind##_8, kind##_9, kind##_10, kind##_11, kind##_12}
#endif

/* Which of them: `stream` fetches a whole panel ahead, `tile` half of one, `plain` nothing. */
static const tile_function stream_tiles[] = TILES(stream_tile);
static const tile_function fetching_tiles[] = TILES(tile);
static const tile_function plain_tiles[] = TILES(plain_tile);

/* Rows are cut into tiles of nearly equal height. */
INLINE int64_t count_of_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* c [rows][panels * PANEL] = start + a [rows][depth] x panels. */
static void multiply(const float *a, int64_t a_stride, int64_t rows, int64_t depth, const float *b,
                     int64_t b_size, int64_t panels, int adds, float *c, int64_t c_stride) {
    int64_t tiles = count_of_tiles(rows);
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t i = 0; i < tiles; i++) {
            int64_t begin = rows * i / tiles, height = rows * (i + 1) / tiles - begin;
            for (int64_t v = 0; v < PANEL; v += TILE_COLUMNS) {
                float *to = c + begin * c_stride + panel * PANEL + v;
                tile_args t = {.depth = depth,
                               .a = a + begin * a_stride,
                               .a_stride = a_stride,
                               .b = b + panel * b_size + v,
                               .start = adds ? to : NULL,
                               .start_stride = c_stride,
                               .c = to,
                               .c_stride = c_stride};
                plain_tiles[height](&t);
            }
        }
}
