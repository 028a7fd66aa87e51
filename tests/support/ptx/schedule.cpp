// Runs a warp. Its lanes are in groups, each with its own next instruction. The group that is
// lowest in the text goes first, so that diverged lanes meet again. Under the random schedule any
// group goes first, and lanes meet again at an instruction that makes them wait.

#include <algorithm>
#include <set>
#include <utility>

#include "options.h"
#include "warp.h"

namespace ptx {
namespace {

void merge(std::vector<Group>& groups, Group group) {
  for (Group& other : groups) {
    if (other.at == group.at) {
      other.lanes |= group.lanes;
      return;
    }
  }
  groups.push_back(group);
}

void complete_phase(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived + cluster.ended != cluster.threads) return;
  ++cluster.phase;
  cluster.arrived = 0;
}

// Threads that have ended count as arrived.
void end_lanes(Warp& warp, u32 lanes) {
  Block& block = *warp.block;
  Cluster& cluster = *block.cluster;
  warp.live &= ~lanes;
  for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
    const int i = __builtin_ctz(rest);
    --block.live;
    ++cluster.ended;
    if (warp.arrivals[i] > cluster.phase) --cluster.arrived;
    block.most_waits = std::max(block.most_waits, warp.waits[i]);
  }
  complete_phase(cluster);
}

class Runner {
 public:
  explicit Runner(Warp& warp)
      : warp_(warp),
        kernel_(*warp.kernel),
        code_(kernel_.code.data()),
        is_random_(options().is_random) {}

  bool run() {
    bool has_run = false;
    for (;;) {
      while (release_some()) has_run = true;
      if (warp_.ready.empty()) return has_run;
      has_run = true;
      run_group(take_group());
    }
  }

 private:
  Group take_group() {
    auto& ready = warp_.ready;
    auto chosen =
        std::min_element(ready.begin(), ready.end(), [](Group a, Group b) { return a.at < b.at; });
    if (is_random_) chosen = ready.begin() + static_cast<long>(random_choice(ready.size()));
    const Group group = *chosen;
    ready.erase(chosen);
    return group;
  }

  // The instruction where the running group meets or passes the next one.
  void find_limit() {
    limit_ = kNone;
    if (is_random_) return;
    for (const Group& group : warp_.ready) limit_ = std::min(limit_, group.at);
  }

  void set_aside(Group group) {
    if (group.lanes == 0) return;
    if (is_random_) {
      warp_.ready.push_back(group);
    } else {
      merge(warp_.ready, group);
    }
    find_limit();
  }

  void run_group(Group group) {
    find_limit();
    while (group.lanes != 0) {
      if (group.at >= limit_) return set_aside(group);
      step(group);
    }
  }

  // Runs one instruction, and moves the group on.
  void step(Group& group) {
    const Instruction& in = code_[group.at];
    kernel_.has_run[group.at] = 1;
    ++warp_.instructions;
    const u32 lanes = in.has_predicate ? chosen_lanes(in, group.lanes) : group.lanes;
    switch (in.kind) {
      case Kind::kPlain:
        if (lanes != 0) execute(in, lanes);
        ++group.at;
        break;
      case Kind::kBranch:
        branch(in, group, lanes);
        break;
      case Kind::kCall:
        call(in, group, lanes);
        break;
      case Kind::kReturn:
        give_back(in, lanes);
        group = {group.at + 1, group.lanes & ~lanes};
        break;
      case Kind::kExit:
        end_lanes(warp_, lanes);
        group = {group.at + 1, group.lanes & ~lanes};
        break;
      case Kind::kClusterArrive:
        arrive(in, lanes);
        ++group.at;
        break;
      default:  // those that wait
        if (lanes != 0) merge(warp_.waiting, {group.at, lanes});
        group = {group.at + 1, group.lanes & ~lanes};
    }
  }

  u32 chosen_lanes(const Instruction& in, u32 lanes) {
    require_written(warp_, in, in.predicate, lanes, "a branch or a predicate");
    u32 chosen = 0;
    std::memcpy(&chosen, warp_.registers + in.predicate.offset, sizeof chosen);
    return lanes & (in.negated ? ~chosen : chosen);
  }

  void execute(const Instruction& in, u32 lanes) {
    const u32 written = in.defined == Defined::kByItself ? 0 : lanes_written_by(in);
    in.run(warp_, in, lanes);
    if (in.defined != Defined::kByItself) set_written(warp_, in.d, lanes, written);
  }

  u32 lanes_written_by(const Instruction& in) const {
    const u32 a = written_lanes(warp_, in.a), b = written_lanes(warp_, in.b);
    const u32 all = a & b & written_lanes(warp_, in.c) & written_lanes(warp_, in.e);
    if (in.defined == Defined::kByAll) return all;
    if (in.defined == Defined::kByAny) return lanes_written_by_any(in);
    auto value = [this](const Operand& operand) {
      u32 lanes = 0;
      std::memcpy(&lanes, warp_.registers + operand.offset, sizeof lanes);
      return lanes;
    };
    if (in.defined == Defined::kBySelect) {
      const u32 chosen = value(in.c);
      return written_lanes(warp_, in.c) & ((chosen & a) | (~chosen & b));
    }
    const u32 invert = in.defined == Defined::kByAnd ? kAllLanes : 0;
    return all | (a & (value(in.a) ^ invert)) | (b & (value(in.b) ^ invert));
  }

  // Only register operands count.
  u32 lanes_written_by_any(const Instruction& in) const {
    u32 any = 0;
    bool has_register = false;
    for (const Operand* operand : {&in.a, &in.b, &in.c, &in.e}) {
      if (operand->id == 0) continue;
      has_register = true;
      any |= written_lanes(warp_, *operand);
    }
    return has_register ? any : kAllLanes;
  }

  void branch(const Instruction& in, Group& group, u32 taken) {
    Group jumps{in.target, taken}, goes_on{group.at + 1, group.lanes & ~taken};
    if (taken == 0 || (is_random_ && goes_on.lanes != 0 && random_choice(2) == 0)) {
      std::swap(jumps, goes_on);
    }
    if (!is_random_ && goes_on.lanes != 0 && taken != 0 && goes_on.at < jumps.at) {
      std::swap(jumps, goes_on);
    }
    group = jumps;
    set_aside(goes_on);
  }

  void call(const Instruction& in, Group& group, u32 lanes) {
    for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
      warp_.returns[in.slot * kLanes + static_cast<u32>(__builtin_ctz(rest))] = group.at + 1;
    }
    set_aside({group.at + 1, group.lanes & ~lanes});
    group = {in.target, lanes};
  }

  // Each lane goes on where it came from.
  void give_back(const Instruction& in, u32 lanes) {
    const u32* const to = warp_.returns + in.slot * kLanes;
    for (u32 rest = lanes; rest != 0;) {
      const u32 at = to[__builtin_ctz(rest)];
      u32 same = 0;
      for (u32 i = 0; i < kLanes; ++i) same |= static_cast<u32>(to[i] == at) << i;
      set_aside({at, same & rest});
      rest &= ~same;
    }
  }

  void arrive(const Instruction& in, u32 lanes) {
    Cluster& cluster = *warp_.block->cluster;
    for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<u32>(__builtin_ctz(rest));
      if (++warp_.arrivals[i] > warp_.waits[i] + 1) {
        fail(warp_, in, i, "arrives twice at its cluster's barrier without a wait between");
      }
      ++cluster.arrived;
    }
    complete_phase(cluster);
  }

  // Lets lanes go on that wait for nothing more.
  bool release_some() {
    for (size_t i = 0; i < warp_.waiting.size(); ++i) {
      const Group group = warp_.waiting[i];
      const u32 lanes = released_lanes(code_[group.at], group);
      if (lanes == 0) continue;
      warp_.waiting.erase(warp_.waiting.begin() + static_cast<long>(i));
      if ((group.lanes & ~lanes) != 0) warp_.waiting.push_back({group.at, group.lanes & ~lanes});
      merge(warp_.ready, {group.at + 1, lanes});
      return true;
    }
    return false;
  }

  u32 released_lanes(const Instruction& in, const Group& group) {
    switch (in.kind) {
      case Kind::kExchange:
      case Kind::kVote:
      case Kind::kWarpBarrier:
        return meet(in, group.lanes);
      case Kind::kClusterWait:
        return wait(in, group.lanes);
      case Kind::kCopyWait:
        return try_to_pass(warp_, in, group.lanes);
      default:
        return 0;
    }
  }

  // The lanes that the first one names, if all have come and name the same.
  u32 meet(const Instruction& in, u32 lanes) {
    require_written(warp_, in, in.members, lanes, "a mask of lanes");
    u32 masks[kLanes];
    std::memcpy(masks, warp_.registers + in.members.offset, sizeof masks);
    const auto first = static_cast<u32>(__builtin_ctz(lanes));
    const u32 named = masks[first], met = named & warp_.live;
    if ((named >> first & 1) == 0) fail(warp_, in, first, "names other lanes, and not itself");
    if ((named & ~warp_.lanes) != 0) fail(warp_, in, first, "names lanes that its warp lacks");
    if ((lanes & met) != met) return 0;
    for (u32 rest = met; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<u32>(__builtin_ctz(rest));
      if (masks[i] != named) fail(warp_, in, i, "names other lanes than those that it meets");
    }
    if (in.kind == Kind::kWarpBarrier) {
      if (met == warp_.live) ++warp_.syncs;
      return met;
    }
    if (named != met) fail(warp_, in, first, "names a lane that has ended");
    in.run(warp_, in, met);
    if (met == warp_.live) ++warp_.exchanges;
    return met;
  }

  u32 wait(const Instruction& in, u32 lanes) {
    const Cluster& cluster = *warp_.block->cluster;
    u32 released = 0;
    for (u32 rest = lanes; rest != 0; rest &= rest - 1) {
      const auto i = static_cast<u32>(__builtin_ctz(rest));
      if (warp_.arrivals[i] == warp_.waits[i]) {
        fail(warp_, in, i, "waits at its cluster's barrier without an arrival");
      }
      if (cluster.phase <= warp_.waits[i]) continue;
      ++warp_.waits[i];
      released |= 1u << i;
    }
    return released;
  }

  Warp& warp_;
  Kernel& kernel_;
  const Instruction* const code_;
  const bool is_random_;
  u32 limit_ = kNone;
};

// True if all live lanes wait at the block's barrier. They must be at one instruction, because the
// barrier is for whole warps.
bool is_at_barrier(const Warp& warp) {
  u32 waiting = 0;
  std::set<u32> places;
  for (const Group& group : warp.waiting) {
    if (warp.kernel->code[group.at].kind != Kind::kBlockBarrier) continue;
    waiting |= group.lanes;
    places.insert(group.at);
  }
  if (waiting != warp.live) return false;
  if (places.size() > 1) {
    const Instruction& first = warp.kernel->code[*places.begin()];
    const Instruction& last = warp.kernel->code[*places.rbegin()];
    fail(warp, first, static_cast<u32>(__builtin_ctz(waiting)),
         "is at a barrier while other lanes of its warp are at another one, " +
             describe(*warp.kernel, last));
  }
  return true;
}

}  // namespace

bool run_warp(Warp& warp) { return Runner(warp).run(); }

bool release_barrier(Block& block) {
  if (block.live == 0) return false;
  for (const auto& warp : block.warps) {
    if (!is_at_barrier(*warp)) return false;
  }
  ++block.barriers;
  for (const auto& warp : block.warps) {
    for (const Group& group : std::exchange(warp->waiting, {})) {
      merge(warp->ready, {group.at + 1, group.lanes});
    }
  }
  return true;
}

}  // namespace ptx
