// The CUDA kernels, compiled for the host.

#include "../../csrc/cuda/arrivals.cu"
#include "../../csrc/cuda/kl_penalty.cu"
