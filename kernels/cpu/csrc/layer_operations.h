/* Normalisation, gates and rotation: little arithmetic, so threads share only many rows. */

/* Floats of an item that is worth a hand-over between threads. */
#define ITEM_FLOATS 16384

typedef struct {
    const void *args;
    void (*rows)(const void *args, int64_t first, int64_t last);
    int64_t count, per_item;
} row_task;

static void row_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const row_task *task = opaque;
    int64_t first = item * task->per_item, last = first + task->per_item;
    task->rows(task->args, first, last < task->count ? last : task->count);
}

static void run_rows(void (*rows)(const void *, int64_t, int64_t), const void *args, int64_t count,
                     int64_t floats) {
    int64_t per_item = ITEM_FLOATS / (floats > 0 ? floats : 1) + 1;
    row_task task = {args, rows, count, per_item};
    if (count <= per_item)
        rows(args, 0, count);
    else
        pool_run(row_item, &task, (count + per_item - 1) / per_item);
}

static void norm_rows(const void *opaque, int64_t first, int64_t last) {
    const norm_args *args = opaque;
    int64_t size = args->size, whole = size - size % WIDTH;
    for (int64_t row = first; row < last; row++) {
        const float *in = args->hidden + row * size;
        if (args->residual) {
            const float *more = args->residual + row * size;
            float *total = args->total + row * size;
            for (int64_t i = 0; i < size; i++)
                total[i] = in[i] + more[i];
            in = total;
        }
        vec squares = {0};
        for (int64_t i = 0; i < whole; i += WIDTH) {
            vec x = load(in + i);
            squares += x * x;
        }
        float mean = sum(squares);
        for (int64_t i = whole; i < size; i++)
            mean += in[i] * in[i];
        float factor = 1.0f / sqrtf(mean / (float)size + args->epsilon);
        float *out = args->normed + row * size;
        for (int64_t i = 0; i < size; i++)
            out[i] = in[i] * factor * args->weight[i];
    }
}

static void norm(const norm_args *args) { run_rows(norm_rows, args, args->rows, args->size); }

INLINE vec gated(vec gate, vec up) {
    vec limited = larger(gate, all(-88.0f)); /* below, the quotient is 0 in all digits but the last */
    return gate / (all(1.0f) + exponential(-limited)) * up;
}

static void gate_rows(const void *opaque, int64_t first, int64_t last) {
    const gate_args *args = opaque;
    int64_t size = args->size, whole = size - size % WIDTH, rest = size - whole;
    for (int64_t row = first; row < last; row++) {
        const float *gates = args->gate_up + row * 2 * size, *ups = gates + size;
        float *out = args->output + row * size;
        for (int64_t i = 0; i < whole; i += WIDTH)
            store(out + i, gated(load(gates + i), load(ups + i)));
        if (rest)
            store_part(out + whole, gated(load_part(gates + whole, rest), load_part(ups + whole, rest)), rest);
    }
}

static void gate(const gate_args *args) { run_rows(gate_rows, args, args->rows, 8 * args->size); }

INLINE void rotate(const float *head, const float *turn, int64_t half, float *out) {
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[half + i], cosine = turn[i], sine = turn[half + i];
        out[i] = a * cosine - b * sine;
        out[half + i] = b * cosine + a * sine;
    }
}

static void rotary_rows(const void *opaque, int64_t first, int64_t last) {
    const rotary_args *args = opaque;
    int64_t dim = args->head_dim, kv = args->num_kv_heads, heads = args->num_heads;
    for (int64_t token = first; token < last; token++) {
        const float *in = args->heads + token * (heads + 2 * kv) * dim;
        const float *turn = args->rotations + token * dim;
        float *query = args->query + token * heads * dim;
        for (int64_t head = 0; head < heads; head++)
            rotate(in + head * dim, turn, dim / 2, query + head * dim);
        int64_t slot = args->slots[token];
        if (slot < 0)
            continue;
        for (int64_t head = 0; head < kv; head++) {
            int64_t place = (slot / args->block_size * kv + head) * args->block_size + slot % args->block_size;
            rotate(in + (heads + head) * dim, turn, dim / 2, args->keys + place * dim);
            memcpy(args->values + place * dim, in + (heads + kv + head) * dim, (size_t)dim * 4);
        }
    }
}

static void rotary(const rotary_args *args) {
    run_rows(rotary_rows, args, args->tokens, (args->num_heads + 2 * args->num_kv_heads) * args->head_dim);
}
