/* Paged attention with an online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
 *
 * A row of one query is cut into segments of its positions, whose partial results are joined at the end
 * (Flash-Decoding); a row of several is cut into tiles of its queries. All heads of a group share what is
 * read of their KV head. Positions outside what a query sees are never read. */

#define QUERY_TILE 48
#define KEY_TILE 64
#define GROUP 4 /* heads of a decode at a time */

/* Blocks lie scattered over a cache. So many runs of keys or values ahead of its use all lines of a run are
 * fetched, and so many ahead its pages are looked up: of 4 KB, each has about one run, and a walk through
 * the tables of pages costs as much as a miss. */
#define FETCH_RUNS 2
#define WALK_RUNS 12
#define LINE 16   /* floats of a line of the cache */
#define PAGE 1024 /* floats of a page, the smallest there is */

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

/* Replaces scores by e^(scale * (score - largest)); returns their sum. There is room up to a multiple of
 * WIDTH, which keeps what it has. */
INLINE float weigh(float *scores, int64_t count, float largest, float scale) {
    vec total = {0};
    int64_t whole = count - count % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        vec weights = exponential((load(scores + i) - all(largest)) * all(scale));
        store(scores + i, weights);
        total += weights;
    }
    if (whole < count) {
        vec found = load(scores + whole), weights = exponential((found - all(largest)) * all(scale));
        ivec own = lanes_below(count - whole);
        store(scores + whole, choose(own, weights, found));
        total += choose(own, weights, (vec){0});
    }
    return sum(total);
}

/* Room as for `weigh`. */
INLINE float largest_of(const float *scores, int64_t count) {
    vec found = all(scores[0]);
    int64_t whole = count - count % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH)
        found = larger(found, load(scores + i));
    if (whole < count)
        found = larger(found, choose(lanes_below(count - whole), load(scores + whole), all(scores[0])));
    return largest_lane(found);
}
