#include "launcher.h"

#include "../jagged_embedding_lookup/op_kernel/jagged_embedding_lookup_backward.cpp"

TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_backward_float, 6)
TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_backward_half, 6)
TURBOGR_LAUNCH_VECTOR(jagged_embedding_lookup_backward_bfloat16, 6)
