#include "launcher.h"

#include "../negative_logits/op_kernel/negative_logits.cpp"

TURBOGR_LAUNCH_VECTOR(negative_logits_float, 6)
TURBOGR_LAUNCH_VECTOR(negative_logits_half, 6)
TURBOGR_LAUNCH_VECTOR(negative_logits_bfloat16, 6)
