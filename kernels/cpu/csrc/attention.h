/* Paged attention of rows of one query and of several, side by side. */
#include "attention_common.h"

#include "decode_attention.h"
#include "prefill_attention.h"

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
    if (args->query_begins[low + 1] - args->query_begins[low] == 1) {
        segment s = segment_of(args, low, own);
        attend_segment(task, &s, item);
    } else {
        attend_tile(task, low, own % args->num_kv_heads, own / args->num_kv_heads, member);
    }
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
    if (!failed)
        task.first_items[args->rows] = items;
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
