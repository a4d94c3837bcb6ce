/* Paged attention with an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
 *
 * A row of one query is cut into segments of its positions, whose partial results are joined at the end
 * (Flash-Decoding); a row of several is cut into tiles of its queries. All heads of a group share what is
 * read of their KV head. Positions outside what a query sees are never read. */

#define QUERY_TILE 48
#define KEY_TILE 64
#define GROUP 4 /* heads of a decode at a time */
#define FETCH_BLOCKS 2 /* how far ahead of its use a block is fetched into the cache */

typedef struct {
    const attention_args *args;
    int64_t *first_items; /* [rows + 1] */
    float *partials;      /* [items][group * (head_dim + 2)]: sums, then largest scores, then weights */
} attention_task;

INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t pieces_of(const attention_args *args, int64_t row) {
    int64_t queries = args->query_begins[row + 1] - args->query_begins[row];
    if (queries == 1)
        return (args->context_lens[row] + SEGMENT) / SEGMENT;
    return (queries + QUERY_TILE - 1) / QUERY_TILE;
}

/* Where a position's vector of a KV head lies in a cache, in floats. */
INLINE int64_t place_of(const attention_args *args, int64_t row, int64_t head, int64_t position) {
    int64_t size = args->block_size;
    int64_t block = args->block_indices[args->block_begins[row] + position / size];
    return ((block * args->num_kv_heads + head) * size + position % size) * args->head_dim;
}

/* Caps the scaled scores where the model does; returns the scale that is left to apply. */
static float cap_scores(const attention_args *args, float *scores, int64_t count) {
    if (!(args->soft_cap > 0))
        return args->scale;
    for (int64_t i = 0; i < count; i++)
        scores[i] = args->soft_cap * tanhf(scores[i] * args->scale / args->soft_cap);
    return 1.0f;
}

/* Replaces scores by e^(scale * (score - largest)); returns their sum. */
INLINE float weigh(float *scores, int64_t count, float largest, float scale) {
    vec total = {0};
    int64_t whole = count - count % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        vec weights = exponential((load(scores + i) - all(largest)) * all(scale));
        store(scores + i, weights);
        total += weights;
    }
    if (whole < count) {
        vec weights = exponential((load_part(scores + whole, count - whole) - all(largest)) * all(scale));
        store_part(scores + whole, weights, count - whole);
        total += load_part(scores + whole, count - whole);
    }
    return sum(total);
}

INLINE float largest_of(const float *scores, int64_t count) {
    vec found = all(scores[0]);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        found = larger(found, load(scores + i));
    float largest = scores[0];
    for (int lane = 0; lane < WIDTH; lane++)
        largest = found[lane] > largest ? found[lane] : largest;
    for (; i < count; i++)
        largest = scores[i] > largest ? scores[i] : largest;
    return largest;
}

/* -- rows of one query ------------------------------------------------------------------------------ */

INLINE void fetch_vector(const float *from, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 16)
        __builtin_prefetch(from + i);
}

/* WIDTH keys at a time, of whole vectors: their products are summed across all at once. */
INLINE void dot_key_group(const float *query, const float *keys, int64_t dim, float *scores) {
    vec parts[WIDTH];
    UNROLL for (int j = 0; j < WIDTH; j++) parts[j] = load(query) * load(keys + j * dim);
    for (int64_t i = WIDTH; i < dim; i += WIDTH) {
        vec x = load(query + i);
        UNROLL for (int j = 0; j < WIDTH; j++) parts[j] += x * load(keys + j * dim + i);
    }
    store(scores, sums_of(parts));
}

INLINE float dot_key(const float *query, const float *key, int64_t dim) {
    vec part = {0};
    int64_t i = 0;
    for (; i + WIDTH <= dim; i += WIDTH)
        part += load(query + i) * load(key + i);
    float score = sum(part);
    for (; i < dim; i++)
        score += query[i] * key[i];
    return score;
}

/* scores[h][j] = query h . key j, for keys that lie one after the other. */
INLINE void dot_keys(const int heads, const float *query, const float *keys, int64_t count, int64_t dim,
                     const float *ahead, float *scores) {
    int64_t j = 0;
    if (dim % WIDTH == 0)
        for (; j + WIDTH <= count; j += WIDTH) {
            for (int i = 0; i < WIDTH; i++)
                fetch_vector(ahead + (j + i) * dim, dim);
            for (int h = 0; h < heads; h++)
                dot_key_group(query + h * dim, keys + j * dim, dim, scores + h * SEGMENT + j);
        }
    for (; j < count; j++) {
        fetch_vector(ahead + j * dim, dim);
        for (int h = 0; h < heads; h++)
            scores[h * SEGMENT + j] = dot_key(query + h * dim, keys + j * dim, dim);
    }
}

INLINE void add_columns(const int heads, const int vectors, const float *weights, const float *values,
                        int64_t count, int64_t dim, const float *ahead, float *sums) {
    vec held[GROUP][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int v = 0; v < vectors; v++) held[h][v] = load(sums + h * dim + v * WIDTH);
    for (int64_t j = 0; j < count; j++) {
        vec value[4];
        UNROLL for (int v = 0; v < vectors; v++) {
            value[v] = load(values + j * dim + v * WIDTH);
            if (v * WIDTH % 16 == 0)
                __builtin_prefetch(ahead + j * dim + v * WIDTH);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            vec weight = all(weights[h * SEGMENT + j]);
            UNROLL for (int v = 0; v < vectors; v++) held[h][v] += weight * value[v];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int v = 0; v < vectors; v++) store(sums + h * dim + v * WIDTH, held[h][v]);
}

/* sums[h] += weights[h][j] * value j. */
INLINE void add_values(const int heads, const float *weights, const float *values, int64_t count,
                       int64_t dim, const float *ahead, float *sums) {
    int64_t i = 0;
    for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH)
        add_columns(heads, 4, weights, values + i, count, dim, ahead + i, sums + i);
    for (; i + WIDTH <= dim; i += WIDTH)
        add_columns(heads, 1, weights, values + i, count, dim, ahead + i, sums + i);
    for (; i < dim; i++)
        for (int h = 0; h < heads; h++)
            for (int64_t j = 0; j < count; j++)
                sums[h * dim + i] += weights[h * SEGMENT + j] * values[j * dim + i];
}

typedef struct {
    int64_t begin, end; /* positions */
    int64_t blocks;     /* that hold them */
    /* Where the keys of each block begin, then the values, then what will be read next. */
    const float *places[2 * SEGMENT + 2 + FETCH_BLOCKS];
} span;

/* Position begin + i lies in the first block, or at a multiple of block_size after it. */
static void find_blocks(const attention_args *args, int64_t row, int64_t head, span *s) {
    int64_t size = args->block_size, first = s->begin / size;
    s->blocks = (s->end - 1) / size - first + 1;
    for (int64_t i = 0; i < s->blocks; i++) {
        int64_t place = place_of(args, row, head, larger_of((first + i) * size, s->begin));
        s->places[i] = args->keys + place;
        s->places[s->blocks + i] = args->values + place;
    }
    /* Most likely the same member goes on with the same row's next head, which is the next in each block. */
    for (int64_t i = 0; i < FETCH_BLOCKS; i++)
        s->places[2 * s->blocks + i] = s->places[i % s->blocks] + size * args->head_dim;
}

/* Heads of one group over a span: sums [heads][dim], largest scores and sums of weights [heads]. */
INLINE void attend_span(const int heads, const attention_args *args, const float *query, const span *s,
                        float *sums, float *largest, float *totals) {
    float scores[GROUP * SEGMENT] __attribute__((aligned(64)));
    int64_t dim = args->head_dim, size = args->block_size, count = s->end - s->begin;
    const float *const *place = s->places;
    for (int64_t p = s->begin, step; p < s->end; p += step, place++) {
        step = smaller_of(size - p % size, s->end - p);
        dot_keys(heads, query, *place, step, dim, place[FETCH_BLOCKS], scores + p - s->begin);
    }
    for (int h = 0; h < heads; h++) {
        float *own = scores + h * SEGMENT;
        float scale = cap_scores(args, own, count);
        float found = largest_of(own, count);
        totals[h] = weigh(own, count, found, scale);
        largest[h] = found * scale;
    }
    memset(sums, 0, (size_t)(heads * dim) * 4);
    for (int64_t p = s->begin, step; p < s->end; p += step, place++) {
        step = smaller_of(size - p % size, s->end - p);
        add_values(heads, scores + p - s->begin, *place, step, dim, place[FETCH_BLOCKS], sums);
    }
}

static void attend_heads(int heads, const attention_args *args, const float *query, const span *where,
                         float *sums, float *largest, float *totals) {
    switch (heads) {
    case 1: attend_span(1, args, query, where, sums, largest, totals); break;
    case 2: attend_span(2, args, query, where, sums, largest, totals); break;
    case 3: attend_span(3, args, query, where, sums, largest, totals); break;
    default: attend_span(4, args, query, where, sums, largest, totals);
    }
}

static void divide(float *to, const float *sums, float total, int64_t dim) {
    float factor = 1.0f / total;
    for (int64_t i = 0; i < dim; i++)
        to[i] = sums[i] * factor;
}

static void attend_segment(const attention_task *task, int64_t row, int64_t head, int64_t piece,
                           int64_t item) {
    const attention_args *args = task->args;
    int64_t dim = args->head_dim, group = args->num_heads / args->num_kv_heads;
    int64_t total = args->context_lens[row] + 1;
    span where;
    where.begin = larger_of(piece * SEGMENT, args->window < total ? total - args->window : 0);
    where.end = smaller_of((piece + 1) * SEGMENT, total);
    int alone = total <= SEGMENT;
    float *partial = alone ? NULL : task->partials + item * group * (dim + 2);
    if (where.begin >= where.end) { /* the window has left this segment */
        for (int64_t h = 0; h < group; h++) {
            partial[group * dim + h] = -INFINITY;
            partial[group * (dim + 1) + h] = 0;
        }
        return;
    }
    find_blocks(args, row, head, &where);
    int64_t first = (args->query_begins[row] * args->num_heads + head * group) * dim;
    for (int64_t h = 0; h < group; h += GROUP) {
        int heads = (int)smaller_of(GROUP, group - h);
        float largest[GROUP], totals[GROUP];
        float *sums = alone ? args->output + first + h * dim : partial + h * dim;
        attend_heads(heads, args, args->query + first + h * dim, &where, sums, largest, totals);
        for (int i = 0; i < heads; i++) {
            if (alone) {
                divide(sums + i * dim, sums + i * dim, totals[i], dim);
            } else {
                partial[group * dim + h + i] = largest[i];
                partial[group * (dim + 1) + h + i] = totals[i];
            }
        }
    }
}

/* Joins the segments of one head of one row. */
static void join_head(const attention_task *task, int64_t row, int64_t head, int64_t h) {
    const attention_args *args = task->args;
    int64_t dim = args->head_dim, group = args->num_heads / args->num_kv_heads;
    int64_t pieces = pieces_of(args, row), kv = args->num_kv_heads, size = group * (dim + 2);
    const float *partials = task->partials + (task->first_items[row] + head) * size;
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < pieces; i++)
        largest = fmaxf(largest, partials[i * kv * size + group * dim + h]);
    float *out = args->output + (args->query_begins[row] * args->num_heads + head * group + h) * dim;
    memset(out, 0, (size_t)dim * 4);
    for (int64_t i = 0; i < pieces; i++) {
        const float *partial = partials + i * kv * size;
        if (partial[group * (dim + 1) + h] == 0)
            continue;
        float factor = expf(partial[group * dim + h] - largest);
        total += factor * partial[group * (dim + 1) + h];
        for (int64_t d = 0; d < dim; d++)
            out[d] += factor * partial[h * dim + d];
    }
    divide(out, out, total, dim);
}

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
    memset(scores, 0, (size_t)low * 4);
    *total += weigh(scores + low, high - low, *largest, scale);
    memset(scores + high, 0, (size_t)(count - high) * 4);
}

static void attend_tile(const attention_task *task, int64_t row, int64_t head, int64_t piece, int member) {
    const attention_args *args = task->args;
    int64_t dim = args->head_dim, wide = padded(dim), group = args->num_heads / args->num_kv_heads;
    int64_t begin = args->query_begins[row] + piece * QUERY_TILE;
    int64_t queries = smaller_of(QUERY_TILE, args->query_begins[row + 1] - begin);
    int64_t position = args->context_lens[row] + piece * QUERY_TILE; /* of the first query */
    int64_t end = position + queries;
    chunk_scratch s = cut_scratch(args, pool_scratch(member, chunk_floats(args) * 4));
    for (int64_t p = args->window <= position ? position + 1 - args->window : 0; p < end; p += KEY_TILE) {
        int64_t count = smaller_of(KEY_TILE, end - p);
        fill_panels(args, row, head, p, count, &s);
        for (int64_t g = 0; g < group; g++) {
            const float *query = args->query + (begin * args->num_heads + head * group + g) * dim;
            multiply(query, args->num_heads * dim, queries, dim, s.keys, dim * PANEL,
                     (count + PANEL - 1) / PANEL, 0, s.scores, KEY_TILE);
            float *sums = s.sums + g * QUERY_TILE * wide;
            for (int64_t q = 0; q < queries; q++) {
                int64_t seen = position + q + 1 - p; /* keys of this tile and those before it */
                int64_t low = args->window < seen ? smaller_of(seen - args->window, count) : 0;
                fold_scores(args, s.scores + q * KEY_TILE, low, smaller_of(larger_of(seen, 0), count), count,
                            &s.largest[g * QUERY_TILE + q], &s.totals[g * QUERY_TILE + q], sums + q * wide);
            }
            multiply(s.scores, KEY_TILE, queries, count, s.values, KEY_TILE * PANEL, wide / PANEL, 1, sums,
                     wide);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t q = 0; q < queries; q++)
            divide(args->output + ((begin + q) * args->num_heads + head * group + g) * dim,
                   s.sums + (g * QUERY_TILE + q) * wide, s.totals[g * QUERY_TILE + q], dim);
}

/* -- all rows --------------------------------------------------------------------------------------- */

static void attention_item(const void *opaque, int64_t item, int member) {
    const attention_task *task = opaque;
    const attention_args *args = task->args;
    int64_t low = 0, high = args->rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (task->first_items[middle] <= item)
            low = middle;
        else
            high = middle;
    }
    int64_t own = item - task->first_items[low];
    int64_t piece = own / args->num_kv_heads, head = own % args->num_kv_heads;
    if (args->query_begins[low + 1] - args->query_begins[low] == 1)
        attend_segment(task, low, head, piece, item);
    else
        attend_tile(task, low, head, piece, member);
}

static void join_segments(const attention_task *task) {
    const attention_args *args = task->args;
    int64_t group = args->num_heads / args->num_kv_heads;
    for (int64_t row = 0; row < args->rows; row++) {
        int64_t queries = args->query_begins[row + 1] - args->query_begins[row];
        if (queries != 1 || args->context_lens[row] < SEGMENT)
            continue;
        for (int64_t head = 0; head < args->num_kv_heads; head++)
            for (int64_t h = 0; h < group; h++)
                join_head(task, row, head, h);
    }
}

static void clear_rest(const attention_args *args) {
    int64_t size = args->num_heads * args->head_dim;
    int64_t first = args->rows ? args->query_begins[0] : args->tokens;
    int64_t last = args->rows ? args->query_begins[args->rows] : args->tokens;
    memset(args->output, 0, (size_t)(first * size) * 4);
    memset(args->output + last * size, 0, (size_t)((args->tokens - last) * size) * 4);
}

static int attention(const attention_args *args) {
    int64_t items = 0, group = args->num_heads / args->num_kv_heads;
    attention_task task = {.args = args};
    task.first_items = malloc((size_t)(args->rows + 1) * sizeof(int64_t));
    int splits = 0, failed = !task.first_items;
    for (int64_t row = 0; row < args->rows && !failed; row++) {
        task.first_items[row] = items;
        int64_t queries = args->query_begins[row + 1] - args->query_begins[row];
        items += pieces_of(args, row) * args->num_kv_heads;
        splits |= queries == 1 && args->context_lens[row] >= SEGMENT;
        if (queries > 1) /* members only ask for what is there already */
            for (int member = 0; member < pool_members() && !failed; member++)
                failed = !pool_scratch(member, chunk_floats(args) * 4);
    }
    if (!failed && splits) {
        task.partials = malloc((size_t)(items * group * (args->head_dim + 2)) * 4);
        failed = !task.partials;
    }
    if (!failed) {
        clear_rest(args);
        pool_run(attention_item, &task, items);
        if (splits)
            join_segments(&task);
    }
    free(task.partials);
    free(task.first_items);
    return failed ? -1 : 0;
}
