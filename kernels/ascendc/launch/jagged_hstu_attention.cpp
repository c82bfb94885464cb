#include "launcher.h"

#include "../jagged_hstu_attention/op_kernel/jagged_hstu_attention.cpp"

TURBOGR_LAUNCH_MIXED(jagged_hstu_attention_float, 12)
TURBOGR_LAUNCH_MIXED(jagged_hstu_attention_half, 12)
TURBOGR_LAUNCH_MIXED(jagged_hstu_attention_bfloat16, 12)
