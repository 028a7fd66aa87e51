// The CUDA kernels, compiled for the host.

#include "device/cuda/arrivals.cu"
#include "penalty/cuda.cu"
#include "penalty/cuda_plain.cu"
