/* Everything that is compiled once per instruction set. The including file defines WIDTH (floats of a
 * vector), TILE_VECTORS and TILE_ROWS (accumulators of a product's tile) and SET (its name). */
#include "vectors.h"

#include "tiles.h"

#include "argmax.h"
#include "attention.h"
#include "grouped.h"
#include "gumbel.h"
#include "layer_operations.h"
#include "linear.h"
#include "rounded.h"

#define JOIN(a, b) a##b
#define NAME_OF(set) JOIN(operations_, set)
#define TEXT(a) #a
#define TEXT_OF(set) TEXT(set)

const operations NAME_OF(SET) = {TEXT_OF(SET), linear, grouped,   norm,   gate,
                                 rotary,       attention, argmax, gumbel};
