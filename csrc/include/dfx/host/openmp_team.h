// The threads of an OpenMP parallel region as a team.
//
// The engine is not linked with OpenMP: a process may hold several libraries of it, and the threads
// of interest are those of the one that the caller's framework uses.
#pragma once
#include "dfx/team.h"

namespace dfx {

// Functions of an OpenMP library.
struct OpenMp {
  // What compilers call for a parallel region: GOMP_parallel of libgomp's ABI, which LLVM's and
  // Intel's libraries have, too.
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread_num)();   // omp_get_thread_num
  int (*num_threads)();  // omp_get_num_threads
};

// Where the calling thread is in a parallel region already, or a limit of OpenMP's is reached,
// there are fewer members.
class OpenMpTeam : public Team {
 public:
  OpenMpTeam(const OpenMp& library, unsigned threads) : library_(library), threads_(threads) {}
  void Run(Body body, void* state) noexcept override;

 private:
  const OpenMp library_;
  const unsigned threads_;
};

}  // namespace dfx
