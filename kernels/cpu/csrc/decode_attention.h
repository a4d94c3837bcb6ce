/* -- rows of one query ------------------------------------------------------------------------------ */

/* Positions that lie one after the other in a cache. */
typedef struct {
    const float *at;
    int64_t count;
} run;

/* What a piece of a decode reads, in this order: the keys of each block, then the values, then the first
 * runs of the pieces after it, which most likely the same member takes. */
typedef struct {
    int64_t blocks;
    run runs[2 * SEGMENT + 2 + WALK_RUNS];
} reading;

/* Fetches positions first .. last of a run into the cache, as far as it has them. */
INLINE void fetch(const run *ahead, int64_t first, int64_t last, int64_t dim) {
    const float *end = ahead->at + smaller_of(last, ahead->count) * dim;
    for (const float *from = ahead->at + first * dim; from < end; from += LINE)
        __builtin_prefetch(from);
}

/* Fetches one line of each page that a run touches: what costs is the walk to the page. */
INLINE void walk_to(const run *ahead, int64_t dim) {
    int64_t floats = ahead->count * dim;
    for (int64_t i = 0; i < floats; i += PAGE)
        __builtin_prefetch(ahead->at + i);
    __builtin_prefetch(ahead->at + larger_of(floats - 1, 0));
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

/* scores[h][j] = query h . key j of a run. */
INLINE void dot_keys(const int heads, const float *query, const run *keys, int64_t dim, float *scores) {
    const run *ahead = keys + FETCH_RUNS;
    int64_t j = 0;
    if (dim % WIDTH == 0)
        for (; j + WIDTH <= keys->count; j += WIDTH) {
            fetch(ahead, j, j + WIDTH, dim);
            for (int h = 0; h < heads; h++)
                dot_key_group(query + h * dim, keys->at + j * dim, dim, scores + h * SEGMENT + j);
        }
    fetch(ahead, j, ahead->count, dim);
    for (; j < keys->count; j++)
        for (int h = 0; h < heads; h++)
            scores[h * SEGMENT + j] = dot_key(query + h * dim, keys->at + j * dim, dim);
}

INLINE void add_columns(const int heads, const int vectors, const float *weights, const run *values,
                        int64_t first, int64_t dim, float *sums) {
    const run *ahead = values + FETCH_RUNS;
    vec held[GROUP][4];
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int v = 0; v < vectors; v++) held[h][v] = load(sums + h * dim + first + v * WIDTH);
    for (int64_t j = 0; j < values->count; j++) {
        vec value[4];
        if (first == 0)
            fetch(ahead, j, j + 1, dim);
        UNROLL for (int v = 0; v < vectors; v++) value[v] = load(values->at + j * dim + first + v * WIDTH);
        UNROLL for (int h = 0; h < heads; h++) {
            vec weight = all(weights[h * SEGMENT + j]);
            UNROLL for (int v = 0; v < vectors; v++) held[h][v] += weight * value[v];
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int v = 0; v < vectors; v++) store(sums + h * dim + first + v * WIDTH, held[h][v]);
}

/* sums[h] += weights[h][j] * value j of a run. */
INLINE void add_values(const int heads, const float *weights, const run *values, int64_t dim, float *sums) {
    int64_t i = 0;
    for (; i + 4 * WIDTH <= dim; i += 4 * WIDTH)
        add_columns(heads, 4, weights, values, i, dim, sums);
    for (; i + WIDTH <= dim; i += WIDTH)
        add_columns(heads, 1, weights, values, i, dim, sums);
    for (; i < dim; i++)
        for (int h = 0; h < heads; h++)
            for (int64_t j = 0; j < values->count; j++)
                sums[h * dim + i] += weights[h * SEGMENT + j] * values->at[j * dim + i];
    fetch(values + FETCH_RUNS, dim < WIDTH ? 0 : values->count, values[FETCH_RUNS].count, dim);
}

/* One piece of a row for one KV head. */
typedef struct {
    int64_t row, head, piece;
    int64_t begin, end; /* positions; none where a window has left it */
} segment;

static segment segment_of(const attention_args *args, int64_t row, int64_t own) {
    segment s = {.row = row, .head = own % args->num_kv_heads, .piece = own / args->num_kv_heads};
    int64_t total = args->context_lens[row] + 1;
    s.begin = larger_of(s.piece * SEGMENT, args->window < total ? total - args->window : 0);
    s.end = smaller_of((s.piece + 1) * SEGMENT, total);
    return s;
}

/* Lists the runs of keys, then those of values, at most `most` in all. Returns how many. */
static int64_t list_runs(const attention_args *args, const segment *s, run *runs, int64_t most) {
    int64_t size = args->block_size, block = s->begin / size, skipped = s->begin - block * size;
    int64_t left = s->end - s->begin, stride = size * args->head_dim, count = 0;
    const int64_t *table = args->block_indices + args->block_begins[s->row] + block;
    for (; left > 0 && count < most; skipped = 0, left -= runs[count++].count) {
        int64_t place = (table[count] * args->num_kv_heads + s->head) * stride + skipped * args->head_dim;
        runs[count] = (run){args->keys + place, smaller_of(size - skipped, left)};
    }
    int64_t blocks = left > 0 ? 0 : count; /* no values before all keys */
    for (int64_t i = 0; i < blocks && count < most; i++)
        runs[count++] = (run){args->values + (runs[i].at - args->keys), runs[i].count};
    return count;
}

/* Lists the first runs of the pieces from `item` on, which is of `row` or of one after it. */
static void list_next(const attention_task *task, int64_t row, int64_t item, run *runs) {
    const attention_args *args = task->args;
    int64_t count = 0;
    for (; count < WALK_RUNS && item < task->first_items[args->rows]; item++) {
        while (item >= task->first_items[row + 1])
            row++;
        if (args->query_begins[row + 1] - args->query_begins[row] > 1)
            break;
        segment next = segment_of(args, row, item - task->first_items[row]);
        count += list_runs(args, &next, runs + count, WALK_RUNS - count);
    }
    for (; count < WALK_RUNS; count++)
        runs[count] = (run){args->keys, 0};
}

/* Heads of one group over a piece: sums [heads][dim], largest scores and sums of weights [heads]. */
INLINE void attend_runs(const int heads, const attention_args *args, const float *query,
                        const reading *from, float *sums, float *largest, float *totals) {
    float scores[GROUP * SEGMENT] __attribute__((aligned(64)));
    int64_t dim = args->head_dim, count = 0;
    const run *next = from->runs, *values = next + from->blocks;
    do { /* a piece has positions, and so runs */
        walk_to(next + WALK_RUNS, dim);
        dot_keys(heads, query, next, dim, scores + count);
        count += next->count;
    } while (++next < values);
    for (int h = 0; h < heads; h++) {
        float *own = scores + h * SEGMENT;
        float scale = cap_scores(args, own, count);
        float found = largest_of(own, count);
        totals[h] = weigh(own, count, found, scale);
        largest[h] = found * scale;
    }
    memset(sums, 0, (size_t)(heads * dim) * 4);
    for (count = 0; next < values + from->blocks; count += next++->count) {
        walk_to(next + WALK_RUNS, dim);
        add_values(heads, scores + count, next, dim, sums);
    }
}

static void attend_heads(int heads, const attention_args *args, const float *query, const reading *from,
                         float *sums, float *largest, float *totals) {
    switch (heads) {
    case 1: attend_runs(1, args, query, from, sums, largest, totals); break;
    case 2: attend_runs(2, args, query, from, sums, largest, totals); break;
    case 3: attend_runs(3, args, query, from, sums, largest, totals); break;
    default: attend_runs(4, args, query, from, sums, largest, totals);
    }
}

static void divide(float *to, const float *sums, float total, int64_t dim) {
    float factor = 1.0f / total;
    for (int64_t i = 0; i < dim; i++)
        to[i] = sums[i] * factor;
}

static void attend_segment(const attention_task *task, const segment *s, int64_t item) {
    const attention_args *args = task->args;
    int64_t dim = args->head_dim, group = args->num_heads / args->num_kv_heads;
    int alone = args->context_lens[s->row] < SEGMENT;
    float *partial = alone ? NULL : task->partials + item * group * (dim + 2);
    if (s->begin >= s->end) { /* the window has left this segment */
        for (int64_t h = 0; h < group; h++) {
            partial[group * dim + h] = -INFINITY;
            partial[group * (dim + 1) + h] = 0;
        }
        return;
    }
    reading from;
    from.blocks = list_runs(args, s, from.runs, 2 * SEGMENT + 2) / 2;
    list_next(task, s->row, item + 1, from.runs + 2 * from.blocks);
    int64_t first = (args->query_begins[s->row] * args->num_heads + s->head * group) * dim;
    for (int64_t h = 0; h < group; h += GROUP) {
        int heads = (int)smaller_of(GROUP, group - h);
        float largest[GROUP], totals[GROUP];
        float *sums = alone ? args->output + first + h * dim : partial + h * dim;
        attend_heads(heads, args, args->query + first + h * dim, &from, sums, largest, totals);
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

