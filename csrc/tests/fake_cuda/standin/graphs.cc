// Graphs that are built call by call.
#include <cstdio>

#include "exports.h"
#include "nodes.h"

namespace fake = dfx::fake;
using fake::S;

namespace dfx::fake {

Work WorkOf(const CUDA_KERNEL_NODE_PARAMS& p) {
  CUfunc_st* function = p.func != nullptr ? p.func : reinterpret_cast<CUfunc_st*>(p.kern);
  return KernelWork(std::make_shared<KernelLaunch>(KernelLaunch{
      function,
      {p.gridDimX, p.gridDimY, p.gridDimZ},
      {p.blockDimX, p.blockDimY, p.blockDimZ},
      p.sharedMemBytes,
      Arguments(*function, p.kernelParams, p.extra),
  }));
}

Work WorkOf(const CUDA_MEMCPY3D& p) {
  auto address = [](CUmemorytype type, const void* host, CUdeviceptr device) {
    return type == CU_MEMORYTYPE_HOST ? reinterpret_cast<CudaAddress>(host) : device;
  };
  if (p.Height > 1 || p.Depth > 1) Missing("copy of more than one row in a graph");
  return CheckedCopy(address(p.dstMemoryType, p.dstHost, p.dstDevice),
                     address(p.srcMemoryType, p.srcHost, p.srcDevice), p.WidthInBytes);
}

Work WorkOf(const CUDA_MEMSET_NODE_PARAMS& p) {
  if (p.height > 1) Missing("fill of more than one row in a graph");
  return CheckedSet(p.dst, p.value, p.elementSize, p.width);
}

Work WorkOf(CUhostFn function, void* data) {
  Work work = HostWork(Kind::kHost, [=] { function(data); });
  work.host_function = reinterpret_cast<void*>(function);
  work.host_data = data;
  return work;
}

bool WorkOf(const CUgraphNodeParams& p, Work* work) {
  switch (p.type) {
    case CU_GRAPH_NODE_TYPE_KERNEL: {
      CUDA_KERNEL_NODE_PARAMS k{};
      k.func = p.kernel.func;
      k.kern = p.kernel.kern;
      k.gridDimX = p.kernel.gridDimX, k.gridDimY = p.kernel.gridDimY;
      k.gridDimZ = p.kernel.gridDimZ;
      k.blockDimX = p.kernel.blockDimX, k.blockDimY = p.kernel.blockDimY;
      k.blockDimZ = p.kernel.blockDimZ;
      k.sharedMemBytes = p.kernel.sharedMemBytes;
      k.kernelParams = p.kernel.kernelParams, k.extra = p.kernel.extra;
      *work = WorkOf(k);
      return true;
    }
    case CU_GRAPH_NODE_TYPE_EMPTY:
      *work = Work{};
      return true;
    case CU_GRAPH_NODE_TYPE_MEMSET:
      *work =
          WorkOf(CUDA_MEMSET_NODE_PARAMS{p.memset.dst, p.memset.pitch, p.memset.value,
                                         p.memset.elementSize, p.memset.width, p.memset.height});
      return true;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      *work = WorkOf(p.memcpy.copyParams);
      return true;
    case CU_GRAPH_NODE_TYPE_HOST:
      *work = WorkOf(p.host.fn, p.host.userData);
      return true;
    default:
      return false;
  }
}

}  // namespace dfx::fake

static CUresult Add(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t n,
                    fake::Work work) {
  CUgraphNode_st* made = fake::AddNode(graph, std::move(work), fake::Nodes(after, after + n));
  if (node != nullptr) *node = made;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphCreate(CUgraph* graph, unsigned) {
  BEGIN("cuGraphCreate", fake::kNothing);
  std::shared_ptr<CUgraph_st> made = fake::NewGraph();
  S().graphs[made.get()] = made;
  *graph = made.get();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  BEGIN("cuGraphDestroy", fake::kNothing);
  if (S().graphs.erase(graph) == 0) RETURN(fake::Misuse("a graph destroyed twice"));
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         size_t n, const CUDA_KERNEL_NODE_PARAMS* p) {
  BEGIN("cuGraphAddKernelNode", fake::kNothing);
  return Add(node, graph, after, n, fake::WorkOf(*p));
}

DFX_EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         size_t n, const CUDA_MEMSET_NODE_PARAMS* p, CUcontext) {
  BEGIN("cuGraphAddMemsetNode", fake::kNothing);
  return Add(node, graph, after, n, fake::WorkOf(*p));
}

DFX_EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                         size_t n, const CUDA_MEMCPY3D* p, CUcontext) {
  BEGIN("cuGraphAddMemcpyNode", fake::kNothing);
  return Add(node, graph, after, n, fake::WorkOf(*p));
}

DFX_EXPORT CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                       size_t n, const CUDA_HOST_NODE_PARAMS* p) {
  BEGIN("cuGraphAddHostNode", fake::kNothing);
  return Add(node, graph, after, n, fake::WorkOf(p->fn, p->userData));
}

DFX_EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                        size_t n) {
  BEGIN("cuGraphAddEmptyNode", fake::kNothing);
  return Add(node, graph, after, n, fake::Work{});
}

// A child is a copy, unless the node takes the graph over: then its nodes stay what they are.
static CUresult AddChild(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t n,
                         CUgraph child, bool take_over) {
  auto found = S().graphs.find(child);
  if (found == S().graphs.end() && take_over) return CUDA_ERROR_INVALID_VALUE;
  fake::Work work;
  work.kind = fake::Kind::kGraph;
  CUgraphNode made = nullptr;
  Add(&made, graph, after, n, std::move(work));
  if (node != nullptr) *node = made;
  if (take_over) {
    made->child = found->second;
    S().graphs.erase(found);
  } else {
    std::map<CUgraphNode_st*, CUgraphNode_st*> copies;
    made->child = fake::Clone(*child, &copies);
  }
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph,
                                             const CUgraphNode* after, size_t n, CUgraph child) {
  BEGIN("cuGraphAddChildGraphNode", fake::kNothing);
  return AddChild(node, graph, after, n, child, false);
}

static CUresult AddConditional(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t n,
                               CUDA_CONDITIONAL_NODE_PARAMS* p) {
  fake::Work work;
  work.kind = fake::Kind::kConditional;
  CUgraphNode made = nullptr;
  Add(&made, graph, after, n, std::move(work));
  made->conditional = p->type;
  made->handle = p->handle;
  // The array that is given out lives as long as the node does in CUDA; here for ever.
  auto* bodies = new CUgraph[p->size];
  for (unsigned i = 0; i < p->size; ++i) {
    made->bodies.push_back(fake::NewGraph());
    bodies[i] = made->bodies.back().get();
  }
  p->phGraph_out = bodies;
  if (node != nullptr) *node = made;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                      const CUgraphEdgeData*, size_t n, CUgraphNodeParams* p) {
  BEGIN("cuGraphAddNode", fake::kNothing);
  if (p->type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
    return AddConditional(node, graph, after, n, &p->conditional);
  }
  if (p->type == CU_GRAPH_NODE_TYPE_GRAPH) {
    const bool take_over = p->graph.ownership == CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE;
    return AddChild(node, graph, after, n, p->graph.graph, take_over);
  }
  fake::Work work;
  if (!fake::WorkOf(*p, &work)) {
    RETURN(fake::Missing("cuGraphAddNode of type " + std::to_string(p->type)));
  }
  return Add(node, graph, after, n, std::move(work));
}

#undef cuGraphAddNode
DFX_EXPORT CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                   size_t n, CUgraphNodeParams* p) {
  return cuGraphAddNode_v2(node, graph, after, nullptr, n, p);
}

DFX_EXPORT CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle* handle, CUgraph,
                                                   CUcontext, unsigned value, unsigned) {
  BEGIN("cuGraphConditionalHandleCreate", fake::kNothing);
  *handle = ++S().ids;
  S().conditions[*handle] = value;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphAddDependencies_v2(CUgraph, const CUgraphNode* from,
                                              const CUgraphNode* to, const CUgraphEdgeData*,
                                              size_t n) {
  BEGIN("cuGraphAddDependencies", fake::kNothing);
  for (size_t i = 0; i < n; ++i) {
    if (!to[i]->after.insert(from[i]).second) return CUDA_ERROR_INVALID_VALUE;  // there already
  }
  return CUDA_SUCCESS;
}

#undef cuGraphAddDependencies
DFX_EXPORT CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode* from,
                                           const CUgraphNode* to, size_t n) {
  return cuGraphAddDependencies_v2(graph, from, to, nullptr, n);
}

// ---- questions ----

DFX_EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* n) {
  BEGIN("cuGraphGetNodes", fake::kNothing);
  for (size_t i = 0; nodes != nullptr && i < *n && i < graph->nodes.size(); ++i) {
    nodes[i] = graph->nodes[i].get();
  }
  *n = graph->nodes.size();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, size_t* n) {
  BEGIN("cuGraphGetRootNodes", fake::kNothing);
  size_t found = 0;
  for (const auto& node : graph->nodes) {
    if (!node->after.empty()) continue;
    if (nodes != nullptr && found < *n) nodes[found] = node.get();
    ++found;
  }
  *n = found;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode* after,
                                                  CUgraphEdgeData* edges, size_t* n) {
  BEGIN("cuGraphNodeGetDependencies", fake::kNothing);
  if (edges != nullptr) std::memset(edges, 0, *n * sizeof *edges);
  size_t i = 0;
  for (CUgraphNode_st* each : node->after) {
    if (after != nullptr && i < *n) after[i] = each;
    ++i;
  }
  *n = i;
  return CUDA_SUCCESS;
}

#undef cuGraphNodeGetDependencies
DFX_EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* after, size_t* n) {
  return cuGraphNodeGetDependencies_v2(node, after, nullptr, n);
}

DFX_EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  BEGIN("cuGraphNodeGetType", fake::kNothing);
  static const std::map<fake::Kind, CUgraphNodeType> types = {
      {fake::Kind::kEmpty, CU_GRAPH_NODE_TYPE_EMPTY},
      {fake::Kind::kKernel, CU_GRAPH_NODE_TYPE_KERNEL},
      {fake::Kind::kCopy, CU_GRAPH_NODE_TYPE_MEMCPY},
      {fake::Kind::kSet, CU_GRAPH_NODE_TYPE_MEMSET},
      {fake::Kind::kHost, CU_GRAPH_NODE_TYPE_HOST},
      {fake::Kind::kAlloc, CU_GRAPH_NODE_TYPE_MEM_ALLOC},
      {fake::Kind::kFree, CU_GRAPH_NODE_TYPE_MEM_FREE},
      {fake::Kind::kGraph, CU_GRAPH_NODE_TYPE_GRAPH},
      {fake::Kind::kConditional, CU_GRAPH_NODE_TYPE_CONDITIONAL},
  };
  *type = types.at(node->work.kind);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
  BEGIN("cuGraphChildGraphNodeGetGraph", fake::kNothing);
  *graph = node->child.get();
  return *graph == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* p) {
  BEGIN("cuGraphKernelNodeGetParams", fake::kNothing);
  if (node->work.launch == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const fake::KernelLaunch& launch = *node->work.launch;
  node->argument_pointers.clear();
  for (const auto& argument : launch.arguments) {
    node->argument_pointers.push_back(const_cast<char*>(argument.data()));
  }
  std::memset(p, 0, sizeof *p);
  p->func = launch.function;
  p->gridDimX = launch.grid[0], p->gridDimY = launch.grid[1], p->gridDimZ = launch.grid[2];
  p->blockDimX = launch.block[0], p->blockDimY = launch.block[1], p->blockDimZ = launch.block[2];
  p->sharedMemBytes = launch.shared_bytes;
  p->kernelParams = node->argument_pointers.data();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphKernelNodeSetAttribute(CUgraphNode, CUlaunchAttributeID,
                                                  const CUlaunchAttributeValue*) {
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphKernelNodeGetAttribute(CUgraphNode, CUlaunchAttributeID,
                                                  CUlaunchAttributeValue* value) {
  std::memset(value, 0, sizeof *value);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned) {
  BEGIN("cuGraphDebugDotPrint", fake::kNothing);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  std::fputs("digraph {\n", file);
  for (const auto& node : graph->nodes) {
    std::fprintf(file, "n%lu [label=\"%s\"];\n", node->id, node->work.label.c_str());
    for (CUgraphNode_st* each : node->after)
      std::fprintf(file, "n%lu -> n%lu;\n", each->id, node->id);
  }
  std::fputs("}\n", file);
  std::fclose(file);
  return CUDA_SUCCESS;
}
