// The CUDA kernels over logits, compiled for the host.

#include "device/cuda/chip.cu"
#include "logits/cuda_divergence_backward.cu"
#include "logits/cuda_divergence_forward.cu"
