// The ops' schemas. Each device implements them in its own file.

#include "binding/logits_ops.h"
#include "binding/penalty_ops.h"

namespace klfast {
namespace {

STABLE_TORCH_LIBRARY(klfast, library) {
  rim::define(library);
  rim::define_logits(library);
}

}  // namespace
}  // namespace klfast
