/* -- rows of several queries ------------------------------------------------------------------------ */

typedef struct {
    float *keys;    /* [KEY_TILE / PANEL][head_dim][PANEL] */
    float *values;  /* [ceil(head_dim / PANEL)][KEY_TILE][PANEL] */
    float *scores;  /* [QUERY_TILE][KEY_TILE] */
    float *sums;    /* [group][QUERY_TILE][padded head_dim] */
    float *largest; /* [group][QUERY_TILE] */
    float *totals;  /* [group][QUERY_TILE] */
} chunk_scratch;

INLINE int64_t padded(int64_t dim) { return (dim + PANEL - 1) / PANEL * PANEL; }

static int64_t chunk_floats(const attention_args *args) {
    int64_t group = args->num_heads / args->num_kv_heads, wide = padded(args->head_dim);
    return KEY_TILE * (2 * wide + QUERY_TILE) + group * QUERY_TILE * (wide + 2);
}

static chunk_scratch cut_scratch(const attention_args *args, float *memory) {
    int64_t group = args->num_heads / args->num_kv_heads, wide = padded(args->head_dim);
    chunk_scratch s;
    s.keys = memory;
    s.values = s.keys + KEY_TILE * wide;
    s.scores = s.values + KEY_TILE * wide;
    s.sums = s.scores + KEY_TILE * QUERY_TILE;
    s.largest = s.sums + group * QUERY_TILE * wide;
    s.totals = s.largest + group * QUERY_TILE;
    for (int64_t i = 0; i < group * QUERY_TILE; i++) {
        s.largest[i] = -INFINITY;
        s.totals[i] = 0;
    }
    memset(s.sums, 0, (size_t)(group * QUERY_TILE * wide) * 4);
    return s;
}

typedef float quad __attribute__((vector_size(16)));
typedef int32_t iquad __attribute__((vector_size(16)));

/* Four vectors of four become columns; `to` has PANEL columns. */
INLINE void turn_square(const float *from[4], int64_t d, float *to) {
    quad a, b, c, e;
    memcpy(&a, from[0] + d, 16);
    memcpy(&b, from[1] + d, 16);
    memcpy(&c, from[2] + d, 16);
    memcpy(&e, from[3] + d, 16);
    quad ab_low = __builtin_shuffle(a, b, (iquad){0, 4, 1, 5});
    quad ab_high = __builtin_shuffle(a, b, (iquad){2, 6, 3, 7});
    quad ce_low = __builtin_shuffle(c, e, (iquad){0, 4, 1, 5});
    quad ce_high = __builtin_shuffle(c, e, (iquad){2, 6, 3, 7});
    quad out[4] = {__builtin_shuffle(ab_low, ce_low, (iquad){0, 1, 4, 5}),
                   __builtin_shuffle(ab_low, ce_low, (iquad){2, 3, 6, 7}),
                   __builtin_shuffle(ab_high, ce_high, (iquad){0, 1, 4, 5}),
                   __builtin_shuffle(ab_high, ce_high, (iquad){2, 3, 6, 7})};
    for (int i = 0; i < 4; i++)
        memcpy(to + (d + i) * PANEL, &out[i], 16);
}

/* places[j]: where position begin + j lies in a cache, in floats. */
static void find_places(const attention_args *args, int64_t row, int64_t head, int64_t begin, int64_t count,
                        int64_t *places) {
    int64_t size = args->block_size, offset = begin % size;
    for (int64_t j = 0; j < count; offset = 0) {
        int64_t place = place_of(args, row, head, begin + j);
        for (int64_t end = smaller_of(count, j + size - offset); j < end; j++, place += args->head_dim)
            places[j] = place;
    }
}

/* Keys begin .. begin + count become columns, and values rows, of panels; the rest of the tile is zero. */
static void fill_panels(const attention_args *args, int64_t row, int64_t head, int64_t begin,
                        int64_t count, const chunk_scratch *s) {
    static const float nothing[512] = {0};
    int64_t dim = args->head_dim, places[KEY_TILE];
    find_places(args, row, head, begin, count, places);
    for (int64_t j = 0; j < KEY_TILE && j < (count + PANEL - 1) / PANEL * PANEL; j += 4) {
        const float *keys[4];
        for (int i = 0; i < 4; i++)
            keys[i] = j + i < count ? args->keys + places[j + i] : nothing;
        float *to = s->keys + j / PANEL * dim * PANEL + j % PANEL;
        int64_t d = 0;
        for (; d + 4 <= dim; d += 4)
            turn_square(keys, d, to);
        for (; d < dim; d++)
            for (int i = 0; i < 4; i++)
                to[d * PANEL + i] = keys[i][d];
    }
    for (int64_t j = 0; j < count; j++) {
        const float *value = args->values + places[j];
        for (int64_t d = 0; d < dim; d += PANEL) {
            float *to = s->values + d * KEY_TILE + j * PANEL;
            int64_t width = smaller_of(PANEL, dim - d);
            if (width < PANEL)
                memset(to, 0, PANEL * 4);
            memcpy(to, value + d, (size_t)width * 4);
        }
    }
}

/* One query's scores of a tile of keys become weights; its sums so far are scaled to them. */
static void fold_scores(const attention_args *args, float *scores, int64_t low, int64_t high,
                        int64_t count, float *largest, float *total, float *sums) {
    if (low >= high) {
        memset(scores, 0, (size_t)count * 4);
        return;
    }
    float scale = cap_scores(args, scores + low, high - low);
    float found = largest_of(scores + low, high - low);
    if (found > *largest) {
        float factor = expf((*largest - found) * scale);
        *total *= factor;
        for (int64_t i = 0; i < padded(args->head_dim); i++)
            sums[i] *= factor;
        *largest = found;
    }
    *total += weigh(scores + low, high - low, *largest, scale);
    if (low > 0) /* most tiles are seen whole, and a call for nothing costs as much as the weights */
        memset(scores, 0, (size_t)low * 4);
    if (high < count)
        memset(scores + high, 0, (size_t)(count - high) * 4);
}

typedef struct {
    int64_t head;                   /* of KV */
    int64_t begin, queries;         /* tokens of the forward */
    int64_t position;               /* of the first query */
    int64_t keys_begin, keys_count; /* positions of a tile of keys */
} chunk_tile;

/* Adds a tile of keys and values to the sums of one head of the group. */
static void add_tile(const attention_args *args, const chunk_tile *t, int64_t g, const chunk_scratch *s) {
    int64_t dim = args->head_dim, wide = padded(dim), group = args->num_heads / args->num_kv_heads;
    int64_t first = larger_of(t->keys_begin - t->position, 0); /* query that sees a key of the tile */
    int64_t queries = t->queries - first;
    int64_t count = t->keys_count, stride = args->num_heads * dim;
    float *scores = s->scores + first * KEY_TILE, *sums = s->sums + g * QUERY_TILE * wide;
    multiply(args->query + (t->begin + first) * stride + (t->head * group + g) * dim, stride, queries, dim,
             s->keys, dim * PANEL, (count + PANEL - 1) / PANEL, 0, scores, KEY_TILE);
    for (int64_t q = first; q < t->queries; q++) {
        int64_t seen = t->position + q + 1 - t->keys_begin; /* keys of this tile and those before it */
        int64_t low = args->window < seen ? smaller_of(seen - args->window, count) : 0;
        fold_scores(args, s->scores + q * KEY_TILE, low, smaller_of(seen, count), count,
                    &s->largest[g * QUERY_TILE + q], &s->totals[g * QUERY_TILE + q], sums + q * wide);
    }
    multiply(scores, KEY_TILE, queries, count, s->values, KEY_TILE * PANEL, wide / PANEL, 1,
             sums + first * wide, wide);
}

static void attend_tile(const attention_task *task, int64_t row, int64_t head, int64_t piece, int member) {
    const attention_args *args = task->args;
    int64_t dim = args->head_dim, wide = padded(dim), group = args->num_heads / args->num_kv_heads;
    chunk_tile t = {.head = head, .begin = args->query_begins[row] + piece * QUERY_TILE};
    t.queries = smaller_of(QUERY_TILE, args->query_begins[row + 1] - t.begin);
    t.position = args->context_lens[row] + piece * QUERY_TILE;
    t.keys_begin = args->window <= t.position ? t.position + 1 - args->window : 0;
    chunk_scratch s = cut_scratch(args, pool_scratch(member, chunk_floats(args) * 4));
    for (int64_t end = t.position + t.queries; t.keys_begin < end; t.keys_begin += KEY_TILE) {
        t.keys_count = smaller_of(KEY_TILE, end - t.keys_begin);
        fill_panels(args, row, head, t.keys_begin, t.keys_count, &s);
        for (int64_t g = 0; g < group; g++)
            add_tile(args, &t, g, &s);
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t q = 0; q < t.queries; q++)
            divide(args->output + ((t.begin + q) * args->num_heads + head * group + g) * dim,
                   s.sums + (g * QUERY_TILE + q) * wide, s.totals[g * QUERY_TILE + q], dim);
}
