/* Draws from the softmax of logits / temperature by the Gumbel-max trick (Gumbel, 1954), with the noise of
 * Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The reference,
 * ../../reference/philox.py, says which counter belongs to which value. */

#define DRAWN_AT_ONCE 1024                /* values: a multiple of 4, and of WIDTH */
#define COUNTERS_AT_ONCE (DRAWN_AT_ONCE / 4) /* each gives four words */
#define DRAW_PIECES 8                     /* of one row at most */
#define DRAW_PIECE 8192                   /* values that are worth an item of their own */
#define MIN_TEMPERATURE 1e-30f

typedef struct {
    const gumbel_args *args;
    int64_t pieces;     /* of each row */
    int64_t *likeliest; /* [rows], places of the largest logits */
    struct best {
        float value;
        int64_t place;
    } *best; /* [rows][pieces] */
} gumbel_task;

/* Words [4][count] of the counters (position, sample, first + i, 0). Plain loops: compilers know the
 * instructions that multiply 32 bits to 64. */
static void philox(uint32_t position, uint32_t sample, uint32_t first, uint64_t seed, int64_t count,
                   uint32_t words[4][COUNTERS_AT_ONCE]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int64_t i = 0; i < count; i++) {
        words[0][i] = position;
        words[1][i] = sample;
        words[2][i] = first + (uint32_t)i;
        words[3][i] = 0;
    }
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
        for (int64_t i = 0; i < count; i++) {
            uint64_t product0 = (uint64_t)words[0][i] * 0xD2511F53u;
            uint64_t product1 = (uint64_t)words[2][i] * 0xCD9E8D57u;
            words[0][i] = (uint32_t)(product1 >> 32) ^ words[1][i] ^ key0;
            words[1][i] = (uint32_t)product1;
            words[2][i] = (uint32_t)(product0 >> 32) ^ words[3][i] ^ key1;
            words[3][i] = (uint32_t)product0;
        }
}

/* The natural logarithm of positive normal numbers, to within 2 units in the last place. */
INLINE vec logarithm(vec x) {
    /* x = 2^n m with m from sqrt(1/2) to sqrt(2), and log m = 2 artanh s with s = (m - 1) / (m + 1). */
    ivec bits = (ivec)x, n = (bits - 0x3f3504f3) >> 23;
    vec m = (vec)(bits - (n << 23)), r = m - all(1.0f), s = r / (all(2.0f) + r), square = s * s;
    /* The series to the eleventh power: the rest is below 2e-10 of it. */
    vec series = square * all(2.0f / 11) + all(2.0f / 9);
    series = series * square + all(2.0f / 7);
    series = series * square + all(2.0f / 5);
    series = series * square + all(2.0f / 3);
    vec small = s * square * series + (s + s);
    vec power = __builtin_convertvector(n, vec);
    /* ln 2 in two parts, of which the first times n is exact. */
    return power * all(0.693359375f) + (power * all(-2.12194440e-4f) + small);
}

/* The noise of a word: -log(-log u), u from its upper 23 bits. */
INLINE vec gumbel_of(ivec word) {
    vec u = (__builtin_convertvector((word >> 9) & 0x7fffff, vec) + all(0.5f)) * all(0x1p-23f);
    return -logarithm(-logarithm(u));
}

/* Noise of `count` values from a multiple of 4 on. */
static void noise_of(const gumbel_args *args, int64_t row, int64_t first, int64_t count, float *noise) {
    uint32_t words[4][COUNTERS_AT_ONCE] __attribute__((aligned(64)));
    int32_t mixed[DRAWN_AT_ONCE] __attribute__((aligned(64)));
    int64_t counters = (count + 3) / 4;
    philox((uint32_t)args->positions[row], (uint32_t)args->samples[row], (uint32_t)(first / 4),
           (uint64_t)args->seeds[row], counters, words);
    for (int64_t i = 0; i < counters; i++)
        for (int w = 0; w < 4; w++)
            mixed[4 * i + w] = (int32_t)words[w][i];
    memset(mixed + 4 * counters, 0, (size_t)(DRAWN_AT_ONCE - 4 * counters) * 4);
    for (int64_t i = 0; i < count; i += WIDTH) {
        ivec word;
        memcpy(&word, mixed + i, sizeof word);
        store(noise + i, gumbel_of(word));
    }
}

/* Values first .. first + count of a row, scaled, with their noise. */
static void add_noise(const gumbel_task *task, int64_t row, int64_t first, int64_t count, float *noisy) {
    const gumbel_args *args = task->args;
    const float *own = args->logits + row * args->size, *logits = own + first;
    float temperature = args->temperatures[row], most = own[task->likeliest[row]];
    vec largest = all(isinf(most) ? 0.0f : most);
    vec divisor = all(temperature > MIN_TEMPERATURE ? temperature : MIN_TEMPERATURE);
    noise_of(args, row, first, count, noisy);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        store(noisy + i, (load(logits + i) - largest) / divisor + load(noisy + i));
    if (i < count)
        store(noisy + i, (load_part(logits + i, count - i) - largest) / divisor + load(noisy + i));
}

static void gumbel_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const gumbel_task *task = opaque;
    float noisy[DRAWN_AT_ONCE] __attribute__((aligned(64)));
    int64_t row = item / task->pieces, piece = item % task->pieces, size = task->args->size;
    /* Pieces begin at multiples of 4, where a counter begins. */
    int64_t begin = size * piece / task->pieces / 4 * 4;
    int64_t end = piece + 1 == task->pieces ? size : size * (piece + 1) / task->pieces / 4 * 4;
    struct best best = {-INFINITY, begin};
    for (int64_t first = begin; first < end && !isnan(best.value); first += DRAWN_AT_ONCE) {
        int64_t count = end - first < DRAWN_AT_ONCE ? end - first : DRAWN_AT_ONCE;
        add_noise(task, row, first, count, noisy);
        int64_t place = place_of_largest(noisy, count);
        if (is_preferred(noisy[place], best.value))
            best = (struct best){noisy[place], first + place};
    }
    task->best[item] = best;
}

static int gumbel(const gumbel_args *args) {
    gumbel_task task = {.args = args, .pieces = (args->size + DRAW_PIECE - 1) / DRAW_PIECE};
    task.pieces = task.pieces < DRAW_PIECES ? task.pieces : DRAW_PIECES;
    task.likeliest = malloc((size_t)args->rows * sizeof *task.likeliest + 1);
    task.best = malloc((size_t)(args->rows * task.pieces) * sizeof *task.best + 1);
    int failed = !task.likeliest || !task.best;
    if (!failed) {
        argmax(&(argmax_args){args->logits, args->rows, args->size, task.likeliest});
        pool_run(gumbel_item, &task, args->rows * task.pieces);
        for (int64_t row = 0; row < args->rows; row++) {
            const struct best *own = task.best + row * task.pieces;
            int64_t best = 0;
            for (int64_t i = 1; i < task.pieces; i++)
                if (is_preferred(own[i].value, own[best].value))
                    best = i;
            args->places[row] = own[best].place;
        }
    }
    free(task.likeliest);
    free(task.best);
    return failed ? -1 : 0;
}
