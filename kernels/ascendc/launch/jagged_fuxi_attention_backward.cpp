#include "launcher.h"

#include "../jagged_fuxi_attention/op_kernel/jagged_fuxi_attention_backward.cpp"

TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_backward_float, 17)
TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_backward_half, 17)
TURBOGR_LAUNCH_MIXED(jagged_fuxi_attention_backward_bfloat16, 17)
