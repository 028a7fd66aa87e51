// The CUDA kernels over logits, compiled for the host.

#include "../../csrc/cuda/chip.cu"
#include "../../csrc/cuda/divergence_backward.cu"
#include "../../csrc/cuda/divergence_forward.cu"
