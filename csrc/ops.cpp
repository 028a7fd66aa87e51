// The ops' schemas. Each device implements them in its own file.

#include "ops.h"

#include "logits_ops.h"

namespace klfast {
namespace {

STABLE_TORCH_LIBRARY(klfast, library) {
  rim::define(library);
  rim::define_logits(library);
}

}  // namespace
}  // namespace klfast
