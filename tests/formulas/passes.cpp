// Prints next_step of every step and verdict, a line each: step, verdict, next step. Then the
// verdicts on sums: `passes MASS...` of one model, `passes MASS,OTHER,CANCELS...` of two.

#include "formulas/passes.h"

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

using klfast::passes::next_step;
using klfast::passes::Step;
using klfast::passes::Verdict;
using klfast::passes::verdict_of;

const char* name_of(Step step) {
  switch (step) {
    case Step::kFindFirst:
      return "find-first";
    case Step::kSumFirst:
      return "sum-first";
    case Step::kFindInRow:
      return "find-in-row";
    case Step::kSumFromRow:
      return "sum-from-row";
    case Step::kSumAgain:
      return "sum-again";
    case Step::kDone:
      return "done";
  }
  return "unknown";
}

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kUseless:
      return "useless";
    case Verdict::kPoor:
      return "poor";
    case Verdict::kGood:
      return "good";
  }
  return "unknown";
}

Verdict verdict_on(char* argument) {
  char* rest = argument;
  const double mass = std::strtod(rest, &rest);
  if (*rest != ',') return verdict_of(mass);
  const double other = std::strtod(rest + 1, &rest);
  return verdict_of(mass, other, std::strtod(rest + 1, &rest) != 0);
}

int main(int count, char** arguments) {
  for (Step step : {Step::kFindFirst, Step::kSumFirst, Step::kFindInRow, Step::kSumFromRow,
                    Step::kSumAgain, Step::kDone}) {
    for (Verdict verdict : {Verdict::kUseless, Verdict::kPoor, Verdict::kGood}) {
      std::printf("%s %s %s\n", name_of(step), name_of(verdict), name_of(next_step(step, verdict)));
    }
  }
  for (int i = 1; i < count; ++i) std::printf("%s\n", name_of(verdict_on(arguments[i])));
}
