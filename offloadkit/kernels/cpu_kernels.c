/* Optimizer steps, gradient accumulation, the gradient norm and page population on the CPU, and the seconds of plans.
 *
 * Every floating-point operation is one IEEE operation in the order written: the torch reference and the Triton kernels
 * give the same bits only so. Build with -ffp-contract=off and without fast-math; -O3 -fno-math-errno lets the loops
 * vectorise. The arithmetic is written once, as always-inlined bodies, and built for each CPU level.
 * No Python API is used: offloadkit/kernels/cpu.py loads the library with ctypes, which releases the GIL.
 */
#ifdef __FAST_MATH__
#error "cpu_kernels.c must be built without -ffast-math: its results are compared bit for bit"
#endif
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif
#include "cpu_adamw.h"
#include "cpu_floats.h"
#include "cpu_lion.h"
#include "cpu_plan.h"
#include "cpu_step.h"
#include "cpu_tiny.h"
#define EXPORT __attribute__((visibility("default")))

enum { STEP_PIECE = 16384, ACCUMULATE_PIECE = 65536, NORM_BLOCK = 65536, NORM_COLUMNS = 32, NORM_LEVELS = 11 };
enum { POPULATE_PIECE = 16 << 20 };

/* Numbers known to cpu.py. */
enum { BASELINE = 0, AVX2 = 1, AVX512 = 2, NUM_LEVELS = 3 };

/* ---- Bodies, built once per CPU level --------------------------------------------------------------------------- */

INLINE void accumulate_body(int kind, int add, float *accumulator, const void *gradient, int64_t start, int64_t end) {
    INDEPENDENT
    for (int64_t i = start; i < end; i++) {
        float g = load_gradient(kind, gradient, i);
        accumulator[i] = add ? accumulator[i] + g : g;
    }
}

INLINE void triad_body(float *a, const float *b, float s, int64_t start, int64_t end) {
    INDEPENDENT
    for (int64_t i = start; i < end; i++) a[i] += s * b[i];
}

/* Squares of two rows of 32 columns, added: the first level of the tree. */
INLINE void square_two_rows(int kind, const void *gradient, int64_t start, double *row) {
    INDEPENDENT
    for (int64_t column = 0; column < NORM_COLUMNS; column++) {
        double upper = (double)load_gradient(kind, gradient, start + column);
        double lower = (double)load_gradient(kind, gradient, start + NORM_COLUMNS + column);
        row[column] = upper * upper + lower * lower;
    }
}

INLINE void add_row(double *row, const double *other) {
    for (int column = 0; column < NORM_COLUMNS; column++) row[column] = other[column] + row[column];
}

/* The tree over 2048 rows as a binary counter: waiting[k] holds the sum of 2^(k+1) rows that wait for their neighbour.
 * Rows past the end of a short block are zero and change no sum, so they are left out. */
INLINE double norm_body(int kind, const void *gradient, int64_t start, int64_t length) {
    double waiting[NORM_LEVELS][NORM_COLUMNS], row[NORM_COLUMNS];
    uint32_t last_rows[2 * NORM_COLUMNS] = {0};
    int64_t num_pairs = (length + 2 * NORM_COLUMNS - 1) / (2 * NORM_COLUMNS), whole_pairs = length / (2 * NORM_COLUMNS);
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        if (pair < whole_pairs) {
            square_two_rows(kind, gradient, start + pair * 2 * NORM_COLUMNS, row);
        } else {
            size_t width = kind == FP32 ? 4 : 2, done = (size_t)(pair * 2 * NORM_COLUMNS);
            memcpy(last_rows, (const char *)gradient + ((size_t)start + done) * width, ((size_t)length - done) * width);
            square_two_rows(kind, last_rows, 0, row);
        }
        int level = 0;
        for (; pair >> level & 1; level++) add_row(row, waiting[level]);
        memcpy(waiting[level], row, sizeof row);
    }
    memset(row, 0, sizeof row);
    for (int level = 0; level < NORM_LEVELS; level++)
        if (num_pairs >> level & 1) add_row(row, waiting[level]);
    for (int width = NORM_COLUMNS / 2; width > 0; width /= 2)
        for (int column = 0; column < width; column++) row[column] = row[2 * column] + row[2 * column + 1];
    return row[0];
}

typedef void (*step_function)(const struct step_arrays *, const struct segment *, float, int64_t, int64_t);
typedef void (*accumulate_function)(float *, const void *, int64_t, int64_t);
typedef double (*norm_function)(const void *, int64_t, int64_t);
typedef void (*triad_function)(float *, const float *, float, int64_t, int64_t);

struct level {
    step_function adamw[NUM_PRECISIONS][NUM_KINDS][NUM_KINDS]; /* [precision][weights][gradient] */
    step_function lion[NUM_KINDS][NUM_KINDS];
    accumulate_function accumulate[2][NUM_KINDS]; /* [set, add][gradient] */
    norm_function norm[NUM_KINDS];
    triad_function triad;
};

#define DEFINE_STEP(TARGET, NAME, BODY, ...)                                                                        \
    TARGET static void NAME(const struct step_arrays *arrays, const struct segment *segment, float grad_scale,      \
                            int64_t start, int64_t end) {                                                           \
        BODY(__VA_ARGS__ arrays, segment, grad_scale, start, end);                                                  \
    }
#define DEFINE_STEPS(LEVEL, TARGET, W, G)                                                                           \
    DEFINE_STEP(TARGET, adamw_##LEVEL##_EXACT_##W##_##G, adamw_body, EXACT, W, G,)                                  \
    DEFINE_STEP(TARGET, adamw_##LEVEL##_COMPACT_##W##_##G, adamw_body, COMPACT, W, G,)                              \
    DEFINE_STEP(TARGET, lion_##LEVEL##_##W##_##G, lion_body, W, G,)
#define DEFINE_KIND(LEVEL, TARGET, KIND)                                                                            \
    DEFINE_STEPS(LEVEL, TARGET, KIND, BF16)                                                                         \
    DEFINE_STEPS(LEVEL, TARGET, KIND, FP16)                                                                         \
    DEFINE_STEPS(LEVEL, TARGET, KIND, FP32)                                                                         \
    TARGET static void add_##LEVEL##_##KIND(float *accumulator, const void *gradient, int64_t start, int64_t end) { \
        accumulate_body(KIND, 1, accumulator, gradient, start, end);                                                \
    }                                                                                                               \
    TARGET static void set_##LEVEL##_##KIND(float *accumulator, const void *gradient, int64_t start, int64_t end) { \
        accumulate_body(KIND, 0, accumulator, gradient, start, end);                                                \
    }                                                                                                               \
    TARGET static double norm_##LEVEL##_##KIND(const void *gradient, int64_t start, int64_t length) {               \
        return norm_body(KIND, gradient, start, length);                                                            \
    }
#define KINDS(NAME) {NAME##_BF16, NAME##_FP16, NAME##_FP32}
#define PAIRS_OF_KINDS(NAME) {KINDS(NAME##_BF16), KINDS(NAME##_FP16), KINDS(NAME##_FP32)}
#define ALL_KINDS(FUNCTION) {FUNCTION, FUNCTION, FUNCTION}
#define ALL_PAIRS_OF_KINDS(FUNCTION) {ALL_KINDS(FUNCTION), ALL_KINDS(FUNCTION), ALL_KINDS(FUNCTION)}
#define DEFINE_LEVEL(LEVEL, TARGET, TINY)                                                                           \
    DEFINE_KIND(LEVEL, TARGET, BF16)                                                                                \
    DEFINE_KIND(LEVEL, TARGET, FP16)                                                                                \
    DEFINE_KIND(LEVEL, TARGET, FP32)                                                                                \
    TARGET static void triad_##LEVEL(float *a, const float *b, float s, int64_t start, int64_t end) {               \
        triad_body(a, b, s, start, end);                                                                            \
    }                                                                                                               \
    static const struct level level_##LEVEL = {                                                                     \
        {PAIRS_OF_KINDS(adamw_##LEVEL##_EXACT), PAIRS_OF_KINDS(adamw_##LEVEL##_COMPACT), TINY},                     \
        PAIRS_OF_KINDS(lion_##LEVEL),                                                                               \
        {KINDS(set_##LEVEL), KINDS(add_##LEVEL)},                                                                   \
        KINDS(norm_##LEVEL),                                                                                        \
        triad_##LEVEL,                                                                                              \
    };

DEFINE_STEP(, adamw_tiny_baseline, adamw_tiny_body)
DEFINE_LEVEL(baseline, , ALL_PAIRS_OF_KINDS(adamw_tiny_baseline))
#if defined(__x86_64__)
#if defined(__clang__)
#define WIDE_VECTORS
#else
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
#define OF_AVX2 __attribute__((target(AVX2_TARGET)))
DEFINE_STEP(OF_AVX2, adamw_tiny_avx2_of_any, adamw_tiny_avx2)
DEFINE_LEVEL(avx2, OF_AVX2, ALL_PAIRS_OF_KINDS(adamw_tiny_avx2_of_any))
#define OF_AVX512 __attribute__((target(AVX512_TARGET WIDE_VECTORS)))
#define DEFINE_TINY_512(W, G) DEFINE_STEP(OF_AVX512, adamw_tiny_avx512_##W##_##G, adamw_tiny_avx512, W, G,)
#define DEFINE_TINY_512_OF(W) DEFINE_TINY_512(W, BF16) DEFINE_TINY_512(W, FP16) DEFINE_TINY_512(W, FP32)
DEFINE_TINY_512_OF(BF16)
DEFINE_TINY_512_OF(FP16)
DEFINE_TINY_512_OF(FP32)
DEFINE_LEVEL(avx512, OF_AVX512, PAIRS_OF_KINDS(adamw_tiny_avx512))
static const struct level *const levels[NUM_LEVELS] = {&level_baseline, &level_avx2, &level_avx512};
#else
static const struct level *const levels[NUM_LEVELS] = {&level_baseline, NULL, NULL};
#endif

static atomic_int forced_level = -1;

/* By the instruction itself: __builtin_cpu_supports() finds nothing in libraries that zig builds. */
EXPORT int offloadkit_level_usable(int level) {
    if (level == BASELINE) return 1;
#if defined(__x86_64__)
    const unsigned fma = 1u << 12, saves_registers = 1u << 27, avx2 = 1u << 5;
    const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    const unsigned needed = level == AVX512 ? avx512 : avx2;
    const unsigned registers = level == AVX512 ? 0xe6 : 0x06; /* that the system saves: XMM, YMM, and masks and ZMM */
    unsigned eax, ebx, ecx, edx, saved, saved_high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & fma) || !(ecx & saves_registers)) return 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & registers) != registers) return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & needed) == needed;
#endif
    return 0;
}

/* Use this level, which must be usable, from now on; -1: the best one that is usable. */
EXPORT void offloadkit_force_level(int level) { atomic_store(&forced_level, level); }

static const struct level *current_level(void) {
    int level = atomic_load(&forced_level);
    if (level < 0)
        for (level = NUM_LEVELS - 1; !offloadkit_level_usable(level);) level--;
    return levels[level];
}

/* ---- Thread pool ------------------------------------------------------------------------------------------------ */

struct job {
    void (*run)(const void *call, int64_t piece);
    const void *call;
    int64_t num_pieces;
    _Atomic int64_t next_piece;
    int num_workers; /* pool threads inside the job; under pool.lock, like `link` */
    struct job *link;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct job *jobs;
    int num_threads; /* wanted, the calling thread included */
    int num_started; /* pool threads alive */
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 1, 0};

static void lock_before_fork(void) { pthread_mutex_lock(&pool.lock); }
static void unlock_in_parent(void) { pthread_mutex_unlock(&pool.lock); }

/* The child has none of the pool's threads and no job: it starts its own threads at its first call. */
static void renew_in_child(void) {
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.jobs = NULL;
    pool.num_started = 0;
}

static void watch_forks(void) { pthread_atfork(lock_before_fork, unlock_in_parent, renew_in_child); }

/* Subnormals kept, round to nearest: torch.set_flush_denormal() or a library's fast-math start-up code may have
 * changed that for the calling thread, and new threads inherit it. */
typedef uint64_t float_mode;
static float_mode enter_ieee_mode(void) {
    float_mode previous = 0;
#if defined(__x86_64__)
    previous = _mm_getcsr();
    _mm_setcsr(0x1F80);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(previous));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
#endif
    return previous;
}

static void leave_ieee_mode(float_mode previous) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)previous);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(previous));
#else
    (void)previous;
#endif
}

static void work_on(struct job *job) {
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(&job->next_piece, 1, memory_order_relaxed);
        if (piece >= job->num_pieces) return;
        job->run(job->call, piece);
    }
}

static struct job *first_open_job(void) {
    struct job *job = pool.jobs;
    while (job && atomic_load_explicit(&job->next_piece, memory_order_relaxed) >= job->num_pieces) job = job->link;
    return job;
}

static void *pool_thread(void *unused) {
    (void)unused;
    enter_ieee_mode();
    pthread_mutex_lock(&pool.lock);
    while (pool.num_started < pool.num_threads) {
        struct job *job = first_open_job();
        if (!job) {
            pthread_cond_wait(&pool.work, &pool.lock);
            continue;
        }
        job->num_workers++;
        pthread_mutex_unlock(&pool.lock);
        work_on(job);
        pthread_mutex_lock(&pool.lock);
        if (--job->num_workers == 0) pthread_cond_broadcast(&pool.done);
    }
    pool.num_started--;
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* Starts the threads that are missing; with a thread limit reached, the work is done by fewer. Called with the lock. */
static void start_threads(void) {
    sigset_t all, previous;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous); /* signals stay with the threads of Python */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.num_started < pool.num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, pool_thread, NULL) != 0) break;
        pool.num_started++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
}

/* Runs all pieces on the pool and the calling thread; returns when all are done. Several callers may run at once. */
static void run_job(void (*run)(const void *, int64_t), const void *call, int64_t num_pieces) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct job job = {run, call, num_pieces, 0, 0, NULL};
    pthread_once(&once, watch_forks);
    float_mode previous = enter_ieee_mode();
    pthread_mutex_lock(&pool.lock);
    if (num_pieces > 1) {
        struct job **end = &pool.jobs;
        start_threads();
        while (*end) end = &(*end)->link;
        *end = &job;
        pthread_cond_broadcast(&pool.work);
    }
    pthread_mutex_unlock(&pool.lock);
    work_on(&job);
    pthread_mutex_lock(&pool.lock);
    for (struct job **at = &pool.jobs; *at; at = &(*at)->link)
        if (*at == &job) {
            *at = job.link;
            break;
        }
    while (job.num_workers > 0) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    leave_ieee_mode(previous);
}

EXPORT void offloadkit_set_num_threads(int num_threads) {
    pthread_mutex_lock(&pool.lock);
    pool.num_threads = num_threads;
    pthread_cond_broadcast(&pool.work); /* threads too many leave */
    pthread_mutex_unlock(&pool.lock);
}

EXPORT int offloadkit_num_threads(void) {
    pthread_mutex_lock(&pool.lock);
    int num_threads = pool.num_threads;
    pthread_mutex_unlock(&pool.lock);
    return num_threads;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------ */

struct step_call {
    step_function function;
    const struct step_arrays *arrays;
    const struct segment *segments;
    const int64_t *first_pieces; /* [num_segments]: number of the segment's first piece */
    int64_t num_segments;
    float grad_scale;
};

static void step_piece(const void *untyped, int64_t piece) {
    const struct step_call *call = untyped;
    int64_t low = 0, high = call->num_segments;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (call->first_pieces[middle] <= piece) low = middle;
        else high = middle;
    }
    const struct segment *segment = &call->segments[low];
    int64_t offset = (piece - call->first_pieces[low]) * STEP_PIECE, length = segment->length - offset;
    int64_t start = segment->start + offset;
    if (length > STEP_PIECE) length = STEP_PIECE;
    call->function(call->arrays, segment, call->grad_scale, start, start + length);
}

/* One step over the segments (none of them empty). Returns 0, or ENOMEM. */
static int step(step_function function, const struct step_arrays *arrays, const struct segment *segments,
                int64_t num_segments, float grad_scale) {
    int64_t num_pieces = 0, *first_pieces = malloc((size_t)num_segments * sizeof *first_pieces);
    if (!first_pieces) return ENOMEM;
    for (int64_t i = 0; i < num_segments; i++) {
        first_pieces[i] = num_pieces;
        num_pieces += (segments[i].length + STEP_PIECE - 1) / STEP_PIECE;
    }
    struct step_call call = {function, arrays, segments, first_pieces, num_segments, grad_scale};
    run_job(step_piece, &call, num_pieces);
    free(first_pieces);
    return 0;
}

EXPORT int offloadkit_adamw(const struct step_arrays *arrays, const struct segment *segments, int64_t num_segments,
                            float grad_scale) {
    const struct level *level = current_level();
    step_function function = level->adamw[arrays->precision][arrays->weights_kind][arrays->gradient_kind];
    return step(function, arrays, segments, num_segments, grad_scale);
}

EXPORT int offloadkit_lion(const struct step_arrays *arrays, const struct segment *segments, int64_t num_segments,
                           float grad_scale) {
    step_function function = current_level()->lion[arrays->weights_kind][arrays->gradient_kind];
    return step(function, arrays, segments, num_segments, grad_scale);
}

struct accumulate_call {
    accumulate_function function;
    float *accumulator;
    const void *gradient;
    int64_t length;
};

static void accumulate_piece(const void *untyped, int64_t piece) {
    const struct accumulate_call *call = untyped;
    int64_t start = piece * ACCUMULATE_PIECE, end = start + ACCUMULATE_PIECE;
    call->function(call->accumulator, call->gradient, start, end < call->length ? end : call->length);
}

EXPORT void offloadkit_accumulate(int kind, int add, float *accumulator, const void *gradient, int64_t length) {
    struct accumulate_call call = {current_level()->accumulate[add != 0][kind], accumulator, gradient, length};
    run_job(accumulate_piece, &call, (length + ACCUMULATE_PIECE - 1) / ACCUMULATE_PIECE);
}

struct split_call {
    const float *master;
    void *weights, *remainder;
    int64_t length;
};

static void split_piece(const void *untyped, int64_t piece) {
    const struct split_call *call = untyped;
    int64_t start = piece * ACCUMULATE_PIECE, end = start + ACCUMULATE_PIECE;
    if (end > call->length) end = call->length;
    INDEPENDENT
    for (int64_t i = start; i < end; i++) store_master(BF16, call->weights, call->remainder, i, call->master[i]);
}

/* fp32 master weights as bf16 weights and remainders. DRAM bounds it at every CPU level. */
EXPORT void offloadkit_split(const float *master, void *weights, void *remainder, int64_t length) {
    struct split_call call = {master, weights, remainder, length};
    run_job(split_piece, &call, (length + ACCUMULATE_PIECE - 1) / ACCUMULATE_PIECE);
}

struct round_call {
    const float *values;
    void *rounded;
    int64_t length;
    uint64_t key, first;
    int shift;
};

static void round_piece(const void *untyped, int64_t piece) {
    const struct round_call *call = untyped;
    int64_t start = piece * ACCUMULATE_PIECE, end = start + ACCUMULATE_PIECE;
    if (end > call->length) end = call->length;
    while (start < end) {
        uint64_t number = call->first + (uint64_t)start;
        struct random_source source = random_source_of(number, call->key);
        int64_t same = ((int64_t)1 << 32) - (int64_t)(uint32_t)number, stop = same < end - start ? start + same : end;
        INDEPENDENT
        for (int64_t i = start; i < stop; i++)
            store_moment(COMPACT, call->rounded, i, call->values[i],
                         random_bits(source, (uint32_t)(i - start)) >> call->shift & 0xFFFFu);
        start = stop;
    }
}

/* fp32 moments, from element `first` of a parameter on, as bf16: moments.round_stochastically by the random bits from
 * `shift` on. */
EXPORT void offloadkit_round(const float *values, void *rounded, int64_t length, uint64_t key, int64_t first,
                             int shift) {
    struct round_call call = {values, rounded, length, key, (uint64_t)first, shift};
    run_job(round_piece, &call, (length + ACCUMULATE_PIECE - 1) / ACCUMULATE_PIECE);
}

struct norm_call {
    norm_function function;
    const void *gradient;
    const int64_t *blocks; /* [num_blocks, 2]: start, length <= NORM_BLOCK */
    double *sums;
};

static void norm_piece(const void *untyped, int64_t piece) {
    const struct norm_call *call = untyped;
    call->sums[piece] = call->function(call->gradient, call->blocks[2 * piece], call->blocks[2 * piece + 1]);
}

EXPORT void offloadkit_block_sums(int kind, const void *gradient, const int64_t *blocks, int64_t num_blocks,
                                  double *sums) {
    struct norm_call call = {current_level()->norm[kind], gradient, blocks, sums};
    run_job(norm_piece, &call, num_blocks);
}

struct triad_call {
    triad_function function;
    float *a;
    const float *b;
    float s;
    int64_t length;
};

static void triad_piece(const void *untyped, int64_t piece) {
    const struct triad_call *call = untyped;
    int64_t start = piece * ACCUMULATE_PIECE, end = start + ACCUMULATE_PIECE;
    call->function(call->a, call->b, call->s, start, end < call->length ? end : call->length);
}

/* a[i] += s * b[i]: the memory bandwidth that the other calls are measured against. */
EXPORT void offloadkit_triad(float *a, const float *b, float s, int64_t length) {
    struct triad_call call = {current_level()->triad, a, b, s, length};
    run_job(triad_piece, &call, (length + ACCUMULATE_PIECE - 1) / ACCUMULATE_PIECE);
}

struct populate_call {
    uintptr_t start, end, page_bytes;
    atomic_int *error;
};

static void populate_piece(const void *untyped, int64_t piece) {
    const struct populate_call *call = untyped;
    uintptr_t base = call->start / POPULATE_PIECE * POPULATE_PIECE + (uintptr_t)piece * POPULATE_PIECE;
    uintptr_t start = base > call->start ? base : call->start;
    uintptr_t end = base + POPULATE_PIECE < call->end ? base + POPULATE_PIECE : call->end;
#if defined(__linux__)
    enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE, Linux 5.14; missing from older headers */
    uintptr_t first_page = start / call->page_bytes * call->page_bytes;
    if (madvise((void *)first_page, end - first_page, POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) {
        atomic_store(call->error, errno);
        return;
    }
#endif
    /* For kernels without MADV_POPULATE_WRITE: fault the pages in by writing to each what it holds. */
    for (uintptr_t at = start; at < end; at = at / call->page_bytes * call->page_bytes + call->page_bytes) {
        volatile char *byte = (volatile char *)at;
        *byte = *byte;
    }
}

/* Makes every page of the range present and writable; what it holds stays. Returns 0 or an errno. */
EXPORT int offloadkit_populate(uintptr_t address, uint64_t num_bytes) {
    atomic_int error = 0;
    uintptr_t end = address + num_bytes;
    struct populate_call call = {address, end, (uintptr_t)sysconf(_SC_PAGESIZE), &error};
    if (num_bytes == 0) return 0;
    run_job(populate_piece, &call, (int64_t)((end - 1) / POPULATE_PIECE - address / POPULATE_PIECE + 1));
    return atomic_load(&error);
}

/* Seconds of a step for `number` placements; `out` has four numbers for each (see plan_seconds). Returns 0 or ENOMEM. */
EXPORT int offloadkit_plan_seconds(const struct plan_model *model, const int64_t *codes, const int64_t *levels,
                                   int64_t number, double *out) {
    size_t room = (size_t)(model->num_stages + 5 * model->num_layers + 1);
    double *memory = malloc(room * sizeof *memory);
    if (!memory) return ENOMEM;
    struct plan_memory parts = {.ends = memory, .sent = memory + model->num_stages};
    parts.added = parts.sent + model->num_layers;
    parts.staged = parts.added + model->num_layers;
    parts.starts = parts.staged + model->num_layers;
    parts.seconds = parts.starts + model->num_layers;
    for (int64_t i = 0; i < number; i++) {
        struct candidate of = {codes + i * model->num_layers, levels[3 * i], levels[3 * i + 1], levels[3 * i + 2]};
        plan_seconds(model, &of, &parts, out + 4 * i);
    }
    free(memory);
    return 0;
}
