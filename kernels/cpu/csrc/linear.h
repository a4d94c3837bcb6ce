/* output = input x weight^T + bias, a panel at a time, for as many rows as stay in a second-level cache. */

/* One panel's worth of columns for the rows of a chunk. */
static void linear_panel(const linear_args *args, int64_t first, int64_t rows, int64_t panel) {
    int64_t depth = args->in_size, columns = args->out_size - panel * PANEL;
    const float *b = args->panels + panel * PANEL * depth;
    float padded_bias[PANEL] = {0}, partial[TILE_ROWS * PANEL];
    const float *bias = args->bias ? args->bias + panel * PANEL : NULL;
    int whole = columns >= PANEL;
    if (bias && !whole) {
        memcpy(padded_bias, bias, (size_t)columns * 4);
        bias = padded_bias;
    }
    int last = (panel + 1) * PANEL >= args->out_size;
    int64_t tiles = count_of_tiles(rows), begin = 0;
    for (int64_t i = 0; i < tiles; i++) {
        int64_t end = rows * (i + 1) / tiles, height = end - begin;
        float *c = args->output + (first + begin) * args->out_size + panel * PANEL;
        int64_t c_stride = args->out_size;
        /* While this panel is computed the next one comes: all of it, or half by each of two tiles. */
        int fetching = !last && i < 2;
        tile_args t = {.depth = depth,
                       .a = args->input + (first + begin) * depth,
                       .a_stride = depth,
                       .start_stride = 0,
                       .c_stride = whole ? c_stride : PANEL,
                       .ahead_step = tiles == 1 ? PANEL * 4 : 64};
        for (int64_t v = 0; v < PANEL; v += TILE_COLUMNS) {
            t.b = b + v;
            t.start = bias ? bias + v : NULL;
            t.c = whole ? c + v : partial + v;
            const char *next = (const char *)(b + PANEL * depth);
            t.ahead = tiles == 1 ? next + v * 4 : next + i * depth * 64;
            const tile_function *set = !fetching ? plain_tiles : tiles == 1 ? stream_tiles : fetching_tiles;
            if (tiles > 1 && v > 0)
                set = plain_tiles;
            set[height](&t);
        }
        if (!whole)
            for (int64_t r = 0; r < height; r++)
                memcpy(c + r * c_stride, partial + r * PANEL, (size_t)columns * 4);
        begin = end;
    }
}

static void linear_item(const void *opaque, int64_t item, int member) {
    (void)member;
    const linear_args *args = opaque;
    int64_t panels = (args->out_size + PANEL - 1) / PANEL;
    int64_t first = item / panels * args->chunk_rows;
    int64_t rows = args->rows - first < args->chunk_rows ? args->rows - first : args->chunk_rows;
    linear_panel(args, first, rows, item % panels);
}

static void linear(const linear_args *args) {
    int64_t panels = (args->out_size + PANEL - 1) / PANEL;
    int64_t chunks = (args->rows + args->chunk_rows - 1) / args->chunk_rows;
    pool_run(linear_item, args, chunks * panels);
}
