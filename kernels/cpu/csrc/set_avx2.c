/* The operations for x86-64 with AVX2 and FMA. */
#include "operations.h"
#ifdef HAS_X86_SETS
#pragma GCC target("avx2,fma")
#define WIDTH 8
#define TILE_VECTORS 2
#define TILE_ROWS 6
#define SET avx2
#include "operations_of_set.h"
#endif
