// Capture of streams, and replay of the graphs that come out of it.
#include <algorithm>
#include <random>

#include "state.h"

namespace dfx::fake {

CudaStatus BeginCapture(CUstream_st* stream) {
  LOCK;
  if (stream->capture != nullptr) return kCaptureUnsupported;
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++S().captures;
  stream->capture->origin = stream;
  stream->capture->streams = {stream};
  stream->frontier.clear();
  return 0;
}

CudaStatus EndCapture(CUstream_st* stream, std::shared_ptr<Graph>* graph) {
  LOCK;
  *graph = nullptr;
  std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return kCaptureUnmatched;
  std::set<size_t> joined = stream->frontier;
  for (size_t node = capture->nodes.size(); node-- > 0;) {
    if (joined.count(node) == 0) continue;
    joined.insert(capture->nodes[node].after.begin(), capture->nodes[node].after.end());
  }
  bool all_joined = true;
  for (CUstream_st* member : capture->streams) {
    for (size_t node : member->frontier) all_joined = all_joined && joined.count(node) != 0;
    member->capture = nullptr;
    member->frontier.clear();
  }
  capture->ended = true;
  if (!capture->valid) return kCaptureIsInvalid;
  if (!all_joined) return kCaptureUnjoined;
  *graph = std::make_shared<Graph>();
  (*graph)->nodes = std::move(capture->nodes);
  return 0;
}

CudaStatus LaunchGraph(const std::shared_ptr<Graph>& graph, CUstream_st* stream) {
  LOCK;
  return Enqueue(stream, [graph] {
    thread_local std::mt19937 random(std::random_device{}());
    std::vector<size_t> left(graph->nodes.size());
    for (size_t i = 0; i < left.size(); ++i) left[i] = i;
    std::vector<bool> done(left.size(), false);
    while (!left.empty()) {
      std::shuffle(left.begin(), left.end(), random);
      for (size_t i = 0; i < left.size(); ++i) {
        const Node& node = graph->nodes[left[i]];
        if (!std::all_of(node.after.begin(), node.after.end(), [&](size_t n) { return done[n]; })) {
          continue;
        }
        node.run();
        done[left[i]] = true;
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
  });
}

}  // namespace dfx::fake
