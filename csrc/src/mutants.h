// Faults that tests plant in the engine, to see that they are noticed. Only a build of the tests
// has them (DFX_MUTANTS): everywhere else each question is the constant false, and no code is left
// of it.
#pragma once

namespace dfx {

enum class Mutant {
  kNone,
  kNoWait,       // a lane does not wait for the others' events
  kEarlyRecord,  // events are recorded before what they stand for
  kNoFork,       // lanes do not wait for what the caller's stream was given
  kNoJoin,       // the caller's stream does not wait for the lanes
  kEarlyFree,    // the call's memory is freed before the lanes are joined
  kSharedEvent,  // all events are one
};

#if defined(DFX_MUTANTS)
extern Mutant planted;
inline bool Planted(Mutant mutant) { return planted == mutant; }
#else
constexpr bool Planted(Mutant) { return false; }
#endif

}  // namespace dfx
