/* The place of each row's largest value, as torch has it: of equals the first, and a NaN before all. */

#define ARGMAX_PIECE 16384 /* values of a row that are worth an item of their own */
#define ARGMAX_PIECES 8    /* of one row, and rows that are cut at all */
#define ARGMAX_CHUNK 1024  /* values whose largest alone is kept; the best chunk is searched again */

typedef struct {
    const argmax_args *args;
    int64_t pieces; /* of each row */
    int64_t *found; /* [rows][pieces], places in the row */
} argmax_task;

/* Whether torch's argmax prefers a value to one with a lower place. */
INLINE int is_preferred(float value, float to) { return !isnan(to) && !(value <= to); }

/* Marks in `odd` the lanes that met a NaN, in whose presence the result means nothing. */
INLINE float largest_value(const float *values, int64_t count, ivec *odd) {
    vec found = all(values[0]);
    int64_t whole = count - count % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        vec x = load(values + i);
        *odd |= (ivec)(x != x);
        found = larger(found, x);
    }
    if (whole < count) {
        vec x = load_part(values + whole, count - whole);
        x = choose(lanes_below(count - whole), x, all(values[0]));
        *odd |= (ivec)(x != x);
        found = larger(found, x);
    }
    return largest_lane(found);
}

static int64_t place_of_largest(const float *values, int64_t count) {
    float best = -INFINITY;
    int64_t place = 0;
    ivec odd = {0};
    for (int64_t i = 0; i < count; i += ARGMAX_CHUNK) {
        int64_t left = count - i;
        float largest = largest_value(values + i, left < ARGMAX_CHUNK ? left : ARGMAX_CHUNK, &odd);
        if (largest > best) {
            best = largest;
            place = i;
        }
    }
    for (int lane = 0; lane < WIDTH; lane++)
        if (odd[lane]) {
            for (place = 0; !isnan(values[place]); place++)
                ;
            return place;
        }
    while (values[place] != best)
        place++;
    return place;
}

static void argmax_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const argmax_task *task = opaque;
    int64_t size = task->args->size, piece = item % task->pieces;
    int64_t begin = size * piece / task->pieces, end = size * (piece + 1) / task->pieces;
    const float *row = task->args->values + item / task->pieces * size;
    task->found[item] = begin + place_of_largest(row + begin, end - begin);
}

static void argmax(const argmax_args *args) {
    int64_t found[ARGMAX_PIECES * ARGMAX_PIECES], pieces = 1;
    if (args->rows <= ARGMAX_PIECES)
        pieces = (args->size + ARGMAX_PIECE - 1) / ARGMAX_PIECE;
    pieces = pieces < ARGMAX_PIECES ? pieces : ARGMAX_PIECES;
    argmax_task task = {args, pieces, pieces > 1 ? found : args->places};
    pool_run(argmax_item, &task, args->rows * pieces);
    for (int64_t row = 0; row < args->rows && pieces > 1; row++) {
        const float *values = args->values + row * args->size;
        int64_t best = found[row * pieces];
        for (int64_t i = 1; i < pieces; i++) {
            int64_t other = found[row * pieces + i];
            if (is_preferred(values[other], values[best]))
                best = other;
        }
        args->places[row] = best;
    }
}
