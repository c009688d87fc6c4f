// Threads of a caller's that run the lanes of its call in place of the lanes' own.
//
// A caller whose work outside of plans is shared with threads that spin for more of it (OpenMP) has
// a core taken by each of them while lanes run. When these very threads run the lanes, nobody
// stands in anybody's way, and they are awake for what the caller shares with them next.
#pragma once

namespace dfx {

class Team {
 public:
  using Body = void (*)(void* state, int member, int members);

  virtual ~Team() = default;

  // Calls `body(state, member, members)` once for each member, from 0 (on the calling thread) to
  // members - 1 (each on a thread of its own), and returns when all have returned. There may be
  // fewer members than one would like, and all but the calling thread may come late.
  virtual void Run(Body body, void* state) noexcept = 0;
};

}  // namespace dfx
