/* The operations for x86-64 with AVX-512 and its products of bytes. */
#include "operations.h"
#ifdef HAS_X86_SETS
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512vnni,avx2,fma,prefer-vector-width=512")
#define WIDTH 16
#define TILE_VECTORS 2
#define TILE_ROWS 12
#define SET avx512vnni
#define DOT_BYTES(sum, unsigned_bytes, signed_bytes)                                                      \
    (ivec)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(unsigned_bytes), (__m512i)(signed_bytes))
#include "operations_of_set.h"
#endif
