/* The operations for x86-64 with AVX-512. */
#include "operations.h"
#ifdef HAS_X86_SETS
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,prefer-vector-width=512")
#define WIDTH 16
#define TILE_VECTORS 2
#define TILE_ROWS 12
#define SET avx512
#include "operations_of_set.h"
#endif
