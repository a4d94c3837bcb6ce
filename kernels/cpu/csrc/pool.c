#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

/* Threads that wait for the next task spin this long, then sleep. Between two operations of a forward lie
 * about 10 us of Python; waking a thread takes longer. */
#define SPIN_NANOSECONDS 60000

/* Spins of the caller until it lets others run, of which one may be a member with an item to finish. */
#define PATIENCE 4000

/* A ticket is a task's number (upper 32 bits) and the next item of a member's share: whoever moves it on
 * owns that item. The number keeps a thread that comes late from taking an item of another task. */
typedef struct {
    _Alignas(64) _Atomic uint64_t ticket;
    _Atomic uint32_t end;
    void *scratch; /* touched by its member alone */
    int64_t scratch_bytes;
} share_t;

static struct {
    pthread_mutex_t running; /* held by the thread whose task it is */
    pthread_mutex_t lock;    /* of the sleepers */
    pthread_cond_t wake;
    _Alignas(64) _Atomic uint32_t number;
    _Atomic(pool_task) task;
    _Atomic(const void *) args;
    _Atomic int sharing;
    _Alignas(64) _Atomic int64_t done;
    _Alignas(64) _Atomic int sleepers;
    int members;
    int threads; /* started, the caller not counted */
} pool = {.running = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .members = 1};

static share_t shares[POOL_MAX_MEMBERS];

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Takes items of `owner`'s share of task `number` until none is left. */
static void drain(int owner, uint32_t number, int member) {
    share_t *share = &shares[owner];
    uint64_t ticket = atomic_load(&share->ticket);
    while (ticket >> 32 == number) {
        uint32_t item = (uint32_t)ticket, end = atomic_load(&share->end);
        pool_task task = atomic_load(&pool.task);
        const void *args = atomic_load(&pool.args);
        if (item >= end)
            return;
        /* When this succeeds the task had not changed while its fields were read. */
        if (!atomic_compare_exchange_weak(&share->ticket, &ticket, ticket + 1))
            continue;
        task(args, item, member);
        atomic_fetch_add(&pool.done, 1);
        ticket = atomic_load(&share->ticket);
    }
}

static void take_part(uint32_t number, int member) {
    int sharing = atomic_load(&pool.sharing);
    for (int i = 0; i < sharing; i++)
        drain((member + i) % sharing, number, member);
}

/* Returns the number of a task other than `last`. */
static uint32_t await(uint32_t last) {
    uint32_t number;
    int64_t until = now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if ((number = atomic_load(&pool.number)) != last)
                return number;
            relax();
        }
    } while (now() < until);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while ((number = atomic_load(&pool.number)) == last)
        pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
    return number;
}

static void *work(void *argument) {
    int member = (int)(intptr_t)argument;
    uint32_t last = 0;
    for (;;) {
        last = await(last);
        if (member < atomic_load(&pool.sharing))
            take_part(last, member);
    }
    return NULL;
}

/* A forked child has the pool's memory, but none of its threads. */
static void forget_threads(void) {
    pthread_mutex_init(&pool.running, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.sleepers, 0);
    pool.threads = 0;
}

static void start_threads(void) {
    static int prepared = 0;
    if (!prepared)
        prepared = !pthread_atfork(NULL, NULL, forget_threads);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.threads < pool.members - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)(pool.threads + 1)))
            break; /* the others take its share */
        pool.threads++;
    }
    pthread_attr_destroy(&attributes);
}

int pool_members(void) { return pool.members; }

void pool_set_members(int members) {
    pthread_mutex_lock(&pool.running);
    pool.members = members;
    pthread_mutex_unlock(&pool.running);
}

static void publish(pool_task task, const void *args, int64_t items, int sharing) {
    uint32_t number = atomic_load(&pool.number) + 1;
    /* First no old ticket may be left, or a late thread would take one with the new task's fields. */
    int before = atomic_load(&pool.sharing);
    for (int i = 0; i < before; i++)
        atomic_store(&shares[i].ticket, (uint64_t)number << 32 | UINT32_MAX);
    atomic_store(&pool.task, task);
    atomic_store(&pool.args, args);
    atomic_store(&pool.sharing, sharing);
    atomic_store(&pool.done, 0);
    for (int i = 0; i < sharing; i++) {
        atomic_store(&shares[i].end, (uint32_t)(items * (i + 1) / sharing));
        atomic_store(&shares[i].ticket, (uint64_t)number << 32 | (uint64_t)(items * i / sharing));
    }
    atomic_store(&pool.number, number);
    if (atomic_load(&pool.sleepers) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
}

void pool_run(pool_task task, const void *args, int64_t items) {
    pthread_mutex_lock(&pool.running);
    int sharing = items < pool.members ? (int)items : pool.members;
    if (sharing <= 1) {
        for (int64_t item = 0; item < items; item++)
            task(args, item, 0);
    } else {
        if (pool.threads < pool.members - 1)
            start_threads();
        publish(task, args, items, sharing);
        take_part(atomic_load(&pool.number), 0);
        for (int64_t spins = 0; atomic_load(&pool.done) < items; spins++)
            spins < PATIENCE ? relax() : (void)sched_yield();
    }
    pthread_mutex_unlock(&pool.running);
}

void *pool_scratch(int member, int64_t bytes) {
    share_t *share = &shares[member];
    if (share->scratch_bytes < bytes) {
        free(share->scratch);
        int64_t rounded = (bytes + 4095) / 4096 * 4096;
        share->scratch = aligned_alloc(64, (size_t)rounded);
        share->scratch_bytes = share->scratch ? rounded : 0;
    }
    return share->scratch;
}
