/* A small pool of threads that share the items of one task at a time. */
#ifndef OCTAVO_POOL_H
#define OCTAVO_POOL_H

#include <stdint.h>

#define POOL_MAX_MEMBERS 256

/* `member` is below the number of threads; no two that run at once have the same. */
typedef void (*pool_task)(const void *args, int64_t item, int member);

/* How many threads share a task, the caller included: 1 .. POOL_MAX_MEMBERS. */
void pool_set_members(int members);
int pool_members(void);

/* Calls task(args, item, member) for every item below `items`, and returns when all are done.
 * Members begin with a contiguous share of the items each and then take from the others', so one that
 * the system does not run keeps nobody waiting. Calls from several threads run one after the other. */
void pool_run(pool_task task, const void *args, int64_t items);

/* At least `bytes` of memory, aligned to 64, that is the member's until its next call; NULL: no memory. */
void *pool_scratch(int member, int64_t bytes);

#endif
