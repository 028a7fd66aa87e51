// The CUDA kernels over one model's logits, compiled for the host.

#include "../../csrc/cuda/token_logprobs.cu"
