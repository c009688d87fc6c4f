// Streams, events and host functions.
#include "exports.h"

namespace fake = dfx::fake;
using fake::S;

DFX_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  BEGIN("cuStreamCreate");
  *stream = fake::NewStream(fake::CurrentDevice(), flags, 0);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuStreamQuery(CUstream stream) {
  BEGIN("cuStreamQuery");
  CUstream_st* on = fake::Of(stream);
  if (!fake::Known(on)) RETURN(fake::Misuse("a query of a stream that does not exist"));
  if (on->capture != nullptr) {
    on->capture->valid = false;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  if (!on->Idle()) return CUDA_ERROR_NOT_READY;
  fake::HostKnows(on->order);
  return CUDA_SUCCESS;
}

#define DFX_STREAM_PROPERTY(function, type, value)                                          \
  DFX_EXPORT CUresult function(CUstream stream, type* result) {                             \
    BEGIN(#function);                                                                       \
    CUstream_st* on = fake::Of(stream);                                                     \
    if (!fake::Known(on)) RETURN(fake::Misuse(#function " of a stream that is not there")); \
    *result = value;                                                                        \
    return CUDA_SUCCESS;                                                                    \
  }
DFX_STREAM_PROPERTY(cuStreamGetPriority, int, on->priority)
DFX_STREAM_PROPERTY(cuStreamGetFlags, unsigned, on->flags)
DFX_STREAM_PROPERTY(cuStreamGetId, unsigned long long, on->id)
DFX_STREAM_PROPERTY(cuStreamGetCtx, CUcontext, &S().contexts[on->device])
DFX_STREAM_PROPERTY(cuStreamGetDevice, CUdevice, on->device)

DFX_EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green) {
  BEGIN("cuStreamGetCtx");
  CUstream_st* on = fake::Of(stream);
  *context = on->green != nullptr ? nullptr : &S().contexts[on->device];
  if (green != nullptr) *green = on->green;
  return CUDA_SUCCESS;
}

// What is known of the event when it is asked for; null where it was recorded by a capture.
static CUresult Look(CUevent event, std::shared_ptr<fake::Ticket>* ticket, fake::Order* order) {
  if (S().events.count(event) == 0) RETURN(fake::Misuse("a question about no event"));
  if (event->capture != nullptr) {
    if (!event->capture->ended) event->capture->valid = false;
    return CUDA_ERROR_CAPTURED_EVENT;
  }
  *ticket = event->ticket;
  *order = event->order;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuEventSynchronize(CUevent event) {
  std::shared_ptr<fake::Ticket> ticket;
  fake::Order order;
  {
    BEGIN("cuEventSynchronize");
    ++S().blocking;
    if (CUresult status = Look(event, &ticket, &order); status != CUDA_SUCCESS) return status;
  }
  if (ticket != nullptr) ticket->Wait();
  LOCK;
  fake::HostKnows(order);
  RETURN(S().sticky.load());
}

DFX_EXPORT CUresult cuEventQuery(CUevent event) {
  BEGIN("cuEventQuery");
  std::shared_ptr<fake::Ticket> ticket;
  fake::Order order;
  if (CUresult status = Look(event, &ticket, &order); status != CUDA_SUCCESS) return status;
  if (ticket != nullptr && ticket->done == 0) return CUDA_ERROR_NOT_READY;
  fake::HostKnows(order);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  return static_cast<CUresult>(fake::Driver().EventRecord(event, stream));
}

DFX_EXPORT CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
  BEGIN("cuEventElapsedTime");
  if (from->ticket == nullptr || to->ticket == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (from->ticket->done == 0 || to->ticket->done == 0) return CUDA_ERROR_NOT_READY;
  *ms = static_cast<float>((to->ticket->when - from->ticket->when) * 1e3);
  return CUDA_SUCCESS;
}

// XLA calls this, and asks for attributes of pointers, on threads of its own that have no context:
// a driver takes it from the stream.
DFX_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  BEGIN("cuLaunchHostFunc", fake::kNothing);
  fake::Work work = fake::HostWork(fake::Kind::kHost, [=] { function(data); });
  work.host_function = reinterpret_cast<void*>(function);
  work.host_data = data;
  RETURN(fake::Enqueue(fake::Of(stream), std::move(work)));
}

DFX_EXPORT CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* data, unsigned) {
  return cuLaunchHostFunc(stream, function, data);
}

DFX_EXPORT CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void* data,
                                        unsigned) {
  BEGIN("cuStreamAddCallback");
  CUstream_st* on = fake::Of(stream);
  if (on->capture != nullptr) {
    on->capture->valid = false;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  RETURN(fake::Enqueue(
      on, fake::HostWork(fake::Kind::kHost, [=] { function(stream, CUDA_SUCCESS, data); })));
}

// ---- capture ----

DFX_EXPORT CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  BEGIN("cuStreamBeginCapture");
  std::shared_ptr<CUgraph_st> graph = fake::NewGraph();
  S().graphs[graph.get()] = graph;
  RETURN(fake::BeginCapture(fake::Of(stream), graph, {}, mode));
}

DFX_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph,
                                                const CUgraphNode* after, const CUgraphEdgeData*,
                                                size_t n, CUstreamCaptureMode mode) {
  BEGIN("cuStreamBeginCaptureToGraph");
  auto found = S().graphs.find(graph);
  // A child's graph belongs to its node; the capture holds on to it without owning it.
  std::shared_ptr<CUgraph_st> into =
      found != S().graphs.end() ? found->second : std::shared_ptr<CUgraph_st>(graph, [](auto*) {});
  RETURN(fake::BeginCapture(fake::Of(stream), into, fake::Nodes(after, after + n), mode));
}

DFX_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  BEGIN("cuStreamEndCapture");
  std::shared_ptr<CUgraph_st> made;
  const auto status = fake::EndCaptureLocked(fake::Of(stream), &made);
  if (graph != nullptr) *graph = made.get();
  RETURN(status);
}

DFX_EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  BEGIN("cuStreamIsCapturing");
  const auto& capture = fake::Of(stream)->capture;
  *status = capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
            : capture->valid   ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                               : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status,
                                              cuuint64_t* id, CUgraph* graph,
                                              const CUgraphNode** after,
                                              const CUgraphEdgeData** edges, size_t* n) {
  {
    LOCK;
    stream = fake::Of(stream);
  }
  if (edges != nullptr) *edges = nullptr;
  int value = 0;
  unsigned long long number = 0;
  const auto result = fake::Driver().StreamGetCaptureInfo(stream, &value, &number, graph, after, n);
  *status = static_cast<CUstreamCaptureStatus>(value);
  if (id != nullptr) *id = number;
  RETURN(result);
}

DFX_EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode* after,
                                                         const CUgraphEdgeData*, size_t n,
                                                         unsigned flags) {
  BEGIN("cuStreamUpdateCaptureDependencies");
  CUstream_st* on = fake::Of(stream);
  if (on->capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) on->frontier.clear();
  on->frontier.insert(after, after + n);
  return CUDA_SUCCESS;
}

#undef cuStreamUpdateCaptureDependencies
DFX_EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* after, size_t n,
                                                      unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, after, nullptr, n, flags);
}

DFX_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode", fake::kNothing);
  const int before = fake::CaptureMode();
  fake::CaptureMode() = *mode;
  *mode = static_cast<CUstreamCaptureMode>(before);
  return CUDA_SUCCESS;
}
