#include "dfx/host/openmp_team.h"

namespace dfx {
namespace {

struct Region {
  const OpenMp* library;
  Team::Body body;
  void* state;
};

void RunMember(void* data) {
  const Region& region = *static_cast<Region*>(data);
  region.body(region.state, region.library->thread_num(), region.library->num_threads());
}

}  // namespace

void OpenMpTeam::Run(Body body, void* state) noexcept {
  Region region{&library_, body, state};
  library_.parallel(&RunMember, &region, threads_, 0);
}

}  // namespace dfx
