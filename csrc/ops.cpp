// The ops' schemas. Each device implements them in its own file.

#include "ops.h"

namespace klfast {
namespace {

STABLE_TORCH_LIBRARY(klfast, library) { rim::define(library); }

}  // namespace
}  // namespace klfast
