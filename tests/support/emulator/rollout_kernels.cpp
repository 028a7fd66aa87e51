// The CUDA kernels between sampler and trainer, compiled for the host.

#include "rollout/cuda.cu"
