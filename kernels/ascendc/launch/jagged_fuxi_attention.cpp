#include "launcher.h"

#include "../jagged_fuxi_attention/op_kernel/jagged_fuxi_attention.cpp"

TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_float, 12)
TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_half, 12)
TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_bfloat16, 12)
