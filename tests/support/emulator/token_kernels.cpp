// The CUDA kernels over one model's logits, compiled for the host.

#include "logits/cuda_token_logprobs.cu"
