// Executable graphs: instantiation, launch, update.
#include "exports.h"
#include "nodes.h"

namespace fake = dfx::fake;
using fake::S;

static CUresult Instantiate(CUgraphExec* executable, CUgraph graph) {
  if (CUresult status = static_cast<CUresult>(fake::NotWhileCapturing()); status != CUDA_SUCCESS) {
    return status;
  }
  *executable = new CUgraphExec_st;
  (*executable)->id = ++S().ids;
  (*executable)->graph = fake::Clone(*graph, &(*executable)->copies);
  S().executables.insert(*executable);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph,
                                                unsigned long long) {
  BEGIN("cuGraphInstantiate");
  return Instantiate(executable, graph);
}

DFX_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec* executable, CUgraph graph,
                                                 CUDA_GRAPH_INSTANTIATE_PARAMS* p) {
  BEGIN("cuGraphInstantiate");
  p->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return Instantiate(executable, graph);
}

DFX_EXPORT CUresult cuGraphUpload(CUgraphExec, CUstream) {
  BEGIN("cuGraphUpload");
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  BEGIN("cuGraphLaunch");
  if (S().executables.count(executable) == 0) {
    RETURN(fake::Misuse("a launch of a graph that is gone"));
  }
  ++executable->launches;
  RETURN(fake::LaunchLocked(executable->graph, executable->id, fake::Of(stream)));
}

DFX_EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable) {
  BEGIN("cuGraphExecDestroy", fake::kNothing);
  if (S().executables.erase(executable) == 0) {
    RETURN(fake::Misuse("an executable graph destroyed twice"));
  }
  delete executable;
  return CUDA_SUCCESS;
}

// ---- updates: a node of the graph that was instantiated names the executable's own ----

static CUgraphNode_st* Mine(CUgraphExec executable, CUgraphNode node) {
  if (S().executables.count(executable) == 0) return nullptr;
  auto found = executable->copies.find(node);
  if (found == executable->copies.end()) return nullptr;
  ++executable->updates;
  return found->second;
}

static CUresult Replace(CUgraphExec executable, CUgraphNode node, fake::Work work) {
  CUgraphNode_st* mine = Mine(executable, node);
  if (mine == nullptr || mine->work.kind != work.kind) return CUDA_ERROR_INVALID_VALUE;
  mine->work = std::move(work);
  return CUDA_SUCCESS;
}

static bool SameShape(const CUgraph_st& a, const CUgraph_st& b) {
  if (a.nodes.size() != b.nodes.size()) return false;
  std::map<const CUgraphNode_st*, const CUgraphNode_st*> other;
  for (size_t i = 0; i < a.nodes.size(); ++i) other[a.nodes[i].get()] = b.nodes[i].get();
  for (const auto& [x, y] : other) {
    if (x->work.kind != y->work.kind || x->after.size() != y->after.size()) return false;
    for (CUgraphNode_st* each : x->after) {
      if (y->after.count(const_cast<CUgraphNode_st*>(other.at(each))) == 0) return false;
    }
    if ((x->child == nullptr) != (y->child == nullptr)) return false;
    if (x->child != nullptr && !SameShape(*x->child, *y->child)) return false;
  }
  return true;
}

// Gives the executable's nodes the work of a graph of the same shape.
static void TakeWork(CUgraph_st* mine, const CUgraph_st& other) {
  for (size_t i = 0; i < mine->nodes.size(); ++i) {
    mine->nodes[i]->work = other.nodes[i]->work;
    if (mine->nodes[i]->child != nullptr) {
      TakeWork(mine->nodes[i]->child.get(), *other.nodes[i]->child);
    }
  }
}

DFX_EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                                   const CUDA_KERNEL_NODE_PARAMS* p) {
  BEGIN("cuGraphExecKernelNodeSetParams");
  return Replace(executable, node, fake::WorkOf(*p));
}

DFX_EXPORT CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                                   const CUDA_MEMSET_NODE_PARAMS* p, CUcontext) {
  BEGIN("cuGraphExecMemsetNodeSetParams");
  return Replace(executable, node, fake::WorkOf(*p));
}

DFX_EXPORT CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                                   const CUDA_MEMCPY3D* p, CUcontext) {
  BEGIN("cuGraphExecMemcpyNodeSetParams");
  return Replace(executable, node, fake::WorkOf(*p));
}

static CUresult SetChild(CUgraphExec executable, CUgraphNode node, CUgraph child) {
  CUgraphNode_st* mine = Mine(executable, node);
  if (mine == nullptr || mine->child == nullptr || !SameShape(*mine->child, *child)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TakeWork(mine->child.get(), *child);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                                       CUgraph child) {
  BEGIN("cuGraphExecChildGraphNodeSetParams");
  return SetChild(executable, node, child);
}

DFX_EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec executable, CUgraphNode node,
                                             CUgraphNodeParams* p) {
  BEGIN("cuGraphExecNodeSetParams");
  if (p->type == CU_GRAPH_NODE_TYPE_GRAPH) return SetChild(executable, node, p->graph.graph);
  fake::Work work;
  if (!fake::WorkOf(*p, &work)) {
    RETURN(fake::Missing("cuGraphExecNodeSetParams of type " + std::to_string(p->type)));
  }
  return Replace(executable, node, std::move(work));
}

DFX_EXPORT CUresult cuGraphExecUpdate(CUgraphExec executable, CUgraph graph,
                                      CUgraphExecUpdateResultInfo* info) {
  BEGIN("cuGraphExecUpdate");
  std::memset(info, 0, sizeof *info);
  if (!SameShape(*executable->graph, *graph)) {
    info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  ++executable->updates;
  TakeWork(executable->graph.get(), *graph);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec executable, CUgraphNode node, unsigned on) {
  BEGIN("cuGraphNodeSetEnabled");
  CUgraphNode_st* mine = Mine(executable, node);
  if (mine == nullptr) return CUDA_ERROR_INVALID_VALUE;
  mine->enabled = on != 0;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec executable, CUgraphNode node, unsigned* on) {
  BEGIN("cuGraphNodeGetEnabled");
  auto found = executable->copies.find(node);
  if (found == executable->copies.end()) return CUDA_ERROR_INVALID_VALUE;
  *on = found->second->enabled ? 1 : 0;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice, CUgraphMem_attribute, void* value) {
  const uint64_t none = 0;
  std::memcpy(value, &none, sizeof none);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice) { return CUDA_SUCCESS; }
