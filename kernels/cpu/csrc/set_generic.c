/* The operations on vectors of 4, which every compiler turns into what its processor has. */
#define WIDTH 4
#define TILE_VECTORS 4
#ifdef __aarch64__
#define TILE_ROWS 6
#else
#define TILE_ROWS 3
#endif
#define SET generic
#include "operations_of_set.h"
