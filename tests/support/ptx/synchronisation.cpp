// Barriers of a block, of a warp's lanes and of a cluster. The schedule carries them out.

#include <stdexcept>

#include "table.h"

namespace ptx {
namespace {

// barrier.cluster.arrive.release, barrier.cluster.wait.acquire
void bind_cluster(const Words& words, Instruction& in) {
  if (words.has("arrive") && !words.has("relaxed")) {
    in.kind = Kind::kClusterArrive;
  } else if (words.has("wait")) {
    in.kind = Kind::kClusterWait;
  } else {
    throw std::runtime_error("unknown barrier");
  }
}

// bar.sync 0; bar.warp.sync -1;
void bind_barrier(Operands& operands, const Words& words, Instruction& in) {
  if (words.has("cluster")) return bind_cluster(words, in);
  if (words.has("warp")) {
    in.kind = Kind::kWarpBarrier;
    in.members = operands.value(words.arguments.at(0), 4);
    return;
  }
  const bool is_whole = words.arguments.size() == 1 && words.arguments[0] == "0";
  if (!words.has("sync") || !is_whole) throw std::runtime_error("a barrier but 0 of all threads");
  in.kind = Kind::kBlockBarrier;
}

}  // namespace

void add_synchronisation(Table& table) {
  table.add_form("bar", bind_barrier);
  table.add_form("barrier", bind_barrier);
}

}  // namespace ptx
