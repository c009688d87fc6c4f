// Capture of streams, graphs, and the order in which a replay runs their nodes.
#include <algorithm>
#include <random>

#include "state.h"

namespace dfx::fake {

std::shared_ptr<CUgraph_st> NewGraph() {
  auto graph = std::make_shared<CUgraph_st>();
  graph->id = ++S().ids;
  return graph;
}

CUgraphNode_st* AddNode(CUgraph_st* graph, Work work, Nodes after) {
  auto node = std::make_unique<CUgraphNode_st>();
  node->id = ++S().ids;
  node->graph = graph;
  node->work = std::move(work);
  node->after = std::move(after);
  graph->nodes.push_back(std::move(node));
  return graph->nodes.back().get();
}

std::shared_ptr<CUgraph_st> Clone(const CUgraph_st& graph,
                                  std::map<CUgraphNode_st*, CUgraphNode_st*>* copies) {
  auto clone = std::make_shared<CUgraph_st>();
  clone->id = graph.id;
  for (const auto& node : graph.nodes) {
    auto copy = std::make_unique<CUgraphNode_st>(*node);
    copy->graph = clone.get();
    if (node->child != nullptr) copy->child = Clone(*node->child, copies);
    for (auto& body : copy->bodies) body = Clone(*body, copies);
    (*copies)[node.get()] = copy.get();
    clone->nodes.push_back(std::move(copy));
  }
  for (const auto& copy : clone->nodes) {
    Nodes after;
    for (CUgraphNode_st* node : copy->after) after.insert(copies->at(node));
    copy->after = std::move(after);
  }
  return clone;
}

CudaStatus BeginCapture(CUstream_st* stream, std::shared_ptr<CUgraph_st> graph, Nodes after,
                        int mode) {
  if (!Known(stream)) return Misuse("a capture of a stream that does not exist");
  if (stream->capture != nullptr) return kCaptureUnsupported;
  if (stream->is_default) return kCaptureUnsupported;
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++S().ids;
  stream->capture->origin = stream;
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->graph = std::move(graph);
  stream->capture->streams = {stream};
  stream->frontier = std::move(after);
  S().capturing.insert(stream->capture);
  return 0;
}

CudaStatus EndCaptureLocked(CUstream_st* stream, std::shared_ptr<CUgraph_st>* graph) {
  *graph = nullptr;
  std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return kCaptureUnmatched;
  if (capture->mode != kRelaxed && capture->thread != std::this_thread::get_id()) {
    return kCaptureWrongThread;
  }
  Nodes joined = stream->frontier;
  std::vector<CUgraphNode_st*> open(joined.begin(), joined.end());
  while (!open.empty()) {
    CUgraphNode_st* node = open.back();
    open.pop_back();
    for (CUgraphNode_st* before : node->after) {
      if (joined.insert(before).second) open.push_back(before);
    }
  }
  bool all_joined = true;
  for (CUstream_st* member : capture->streams) {
    for (CUgraphNode_st* node : member->frontier) all_joined = all_joined && joined.count(node);
    member->capture = nullptr;
    member->frontier.clear();
  }
  capture->ended = true;
  S().capturing.erase(capture);
  if (!capture->valid) return kCaptureIsInvalid;
  if (!all_joined) return kCaptureUnjoined;
  *graph = capture->graph;
  return 0;
}

namespace {

constexpr int kHeedlessTurns = 50;

bool RunNode(const CUgraphNode_st& node) {
  if (!node.enabled) return true;
  if (node.child != nullptr) RunGraph(*node.child);
  if (node.bodies.empty()) {
    Run(node.work);
    return true;
  }
  auto value = [&node] {
    LOCK;
    return S().conditions[node.handle];
  };
  enum { kIf, kWhile, kSwitch };  // of CUgraphConditionalNodeType
  if (node.conditional == kWhile) {
    // Where kernels wait for nothing the condition may be garbage, and true for ever.
    for (int turn = 0; value() != 0 && S().sticky == 0; ++turn) {
      if (S().ignore_waits && turn == kHeedlessTurns) break;
      RunGraph(*node.bodies[0]);
    }
  } else if (node.conditional == kSwitch) {
    if (const unsigned chosen = value(); chosen < node.bodies.size()) {
      RunGraph(*node.bodies[chosen]);
    }
  } else if (value() != 0) {
    RunGraph(*node.bodies[0]);
  } else if (node.bodies.size() > 1) {
    RunGraph(*node.bodies[1]);
  }
  return true;
}

}  // namespace

void RunGraph(const CUgraph_st& graph) {
  thread_local std::mt19937 random(std::random_device{}());
  std::map<const CUgraphNode_st*, size_t> missing;
  std::map<const CUgraphNode_st*, std::vector<const CUgraphNode_st*>> then;
  std::vector<const CUgraphNode_st*> ready;
  const bool heedless = S().ignore_waits;  // kernels come when they like
  for (const auto& node : graph.nodes) {
    const bool at_once = node->after.empty() || (heedless && node->work.kind == Kind::kKernel);
    missing[node.get()] = at_once ? 0 : node->after.size();
    if (at_once) ready.push_back(node.get());
    for (const CUgraphNode_st* before : node->after) then[before].push_back(node.get());
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    const CUgraphNode_st* node = ready.back();
    ready.pop_back();
    RunNode(*node);
    for (const CUgraphNode_st* next : then[node]) {
      if (missing[next] != 0 && --missing[next] == 0) ready.push_back(next);
    }
  }
}

CudaStatus LaunchLocked(const std::shared_ptr<CUgraph_st>& graph, uint64_t executable,
                        CUstream_st* stream) {
  if (!Known(stream)) return Misuse("a graph launched on a stream that does not exist");
  // A later update does not change this launch.
  std::map<CUgraphNode_st*, CUgraphNode_st*> copies;
  std::shared_ptr<CUgraph_st> mine = Clone(*graph, &copies);
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return kCaptureIsInvalid;
    Work work;
    work.kind = Kind::kGraph;
    CUgraphNode_st* node = AddNode(stream->capture->graph.get(), std::move(work), stream->frontier);
    node->child = std::move(mine);
    stream->frontier = {node};
    return 0;
  }
  TraceGraph(stream, *mine, executable);
  stream->Push([mine] { RunGraph(*mine); });
  return 0;
}

CudaStatus BeginCapture(CUstream_st* stream) {
  LOCK;
  return BeginCapture(stream, NewGraph(), {}, kGlobal);
}

CudaStatus EndCapture(CUstream_st* stream, std::shared_ptr<Graph>* graph) {
  LOCK;
  *graph = nullptr;
  std::shared_ptr<CUgraph_st> made;
  if (CudaStatus status = EndCaptureLocked(stream, &made); status != 0) return status;
  *graph = std::make_shared<Graph>(Graph{std::move(made)});
  return 0;
}

CudaStatus LaunchGraph(const std::shared_ptr<Graph>& graph, CUstream_st* stream) {
  LOCK;
  return LaunchLocked(graph->graph, 0, stream);
}

}  // namespace dfx::fake
