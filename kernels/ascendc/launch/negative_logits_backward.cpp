#include "launcher.h"

#include "../negative_logits/op_kernel/negative_logits_backward.cpp"

TURBOGR_LAUNCH_VECTOR(negative_logits_backward_float, 11)
TURBOGR_LAUNCH_VECTOR(negative_logits_backward_half, 11)
TURBOGR_LAUNCH_VECTOR(negative_logits_backward_bfloat16, 11)
