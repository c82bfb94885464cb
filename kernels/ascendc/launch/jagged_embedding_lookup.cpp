#include "launcher.h"

#include "../jagged_embedding_lookup/op_kernel/jagged_embedding_lookup.cpp"

TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_float, 5)
TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_half, 5)
TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_bfloat16, 5)
