// The trace: one JSON object a line for each operation that a stream or a launched graph was given,
// with the operations that it comes after by what the driver was told; and, when the host saw the
// end of some, which: what it asks for later comes after them. What an operation touches that it
// learns from the device's memory follows when it runs, under its number.
#include <sstream>

#include "state.h"

namespace dfx::fake {
namespace {

struct Book {
  bool on = false;
  uint64_t launched = 0;  // graphs
  std::string text;
};

Book& B() {
  static Book* book = new Book;
  return *book;
}

const char* Name(Kind kind) {
  static const char* const names[] = {"empty", "kernel", "copy",  "set",        "host",
                                      "alloc", "free",   "graph", "conditional"};
  return names[static_cast<int>(kind)];
}

std::string Hex(const std::vector<char>& bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += digits[static_cast<unsigned char>(byte) >> 4];
    text += digits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

void Accesses(std::ostringstream& to, const std::vector<Access>& accesses) {
  to << ",\"accesses\":[";
  const char* comma = "";
  for (const Access& access : accesses) {
    to << comma << "[" << access.address << "," << access.bytes << ","
       << (access.write ? "true" : "false") << "]";
    comma = ",";
  }
  to << "]}\n";
}

void List(std::ostringstream& to, const char* name, const Order& order) {
  to << ",\"" << name << "\":[";
  const char* comma = "";
  for (uint64_t each : order) {
    to << comma << each;
    comma = ",";
  }
  to << "]";
}

uint64_t Line(const CUstream_st& stream, const Work& work, const Order& after, uint64_t executable,
              uint64_t node) {
  const uint64_t id = ++S().ids;
  std::ostringstream line;
  line << "{\"op\":" << id << ",\"stream\":" << stream.id << ",\"device\":" << stream.device
       << ",\"kind\":\"" << Name(work.kind) << "\",\"name\":\"" << work.label << "\"";
  if (executable != 0)
    line << ",\"graph\":" << executable << ",\"node\":" << node << ",\"launched\":" << B().launched;
  List(line, "after", after);
  if (work.launch != nullptr) {
    line << ",\"module\":" << work.launch->function->module->id << ",\"blocks\":"
         << uint64_t{work.launch->grid[0]} * work.launch->grid[1] * work.launch->grid[2]
         << ",\"threads\":"
         << uint64_t{work.launch->block[0]} * work.launch->block[1] * work.launch->block[2]
         << ",\"arguments\":[";
    const char* comma = "";
    for (const std::vector<char>& argument : work.launch->arguments) {
      line << comma << "\"" << Hex(argument) << "\"";
      comma = ",";
    }
    line << "]";
  }
  Accesses(line, work.accesses);
  B().text += line.str();
  work.traced = id;
  return id;
}

Order GraphLines(const CUstream_st& stream, const CUgraph_st& graph, const Order& before,
                 uint64_t executable) {
  std::map<const CUgraphNode_st*, Order> ends;
  Order sinks = graph.nodes.empty() ? before : Order{};
  std::set<const CUgraphNode_st*> inner;
  std::vector<const CUgraphNode_st*> left;
  for (const auto& node : graph.nodes) left.push_back(node.get());
  while (!left.empty()) {
    std::vector<const CUgraphNode_st*> later;
    for (const CUgraphNode_st* node : left) {
      Order after;
      bool ready = true;
      for (const CUgraphNode_st* each : node->after) {
        auto found = ends.find(each);
        ready = ready && found != ends.end();
        if (ready) after.insert(found->second.begin(), found->second.end());
      }
      if (!ready) {
        later.push_back(node);
        continue;
      }
      if (node->after.empty()) after = before;
      for (const CUgraphNode_st* each : node->after) inner.insert(each);
      if (node->child != nullptr) {
        ends[node] = GraphLines(stream, *node->child, after, executable);
      } else {
        ends[node] = {Line(stream, node->work, after, executable, node->id)};
        for (const auto& body : node->bodies) {
          const Order end = GraphLines(stream, *body, ends[node], executable);
          ends[node].insert(end.begin(), end.end());
        }
      }
    }
    if (later.size() == left.size()) break;  // a cycle: nothing of it runs
    left = std::move(later);
  }
  for (const auto& [node, end] : ends) {
    if (inner.count(node) == 0) sinks.insert(end.begin(), end.end());
  }
  return sinks;
}

}  // namespace

bool Tracing() { return B().on; }

void TraceText(const std::string& line) {
  if (B().on) B().text += line + "\n";
}

void HostKnows(const Order& order) {
  if (!B().on || order.empty()) return;
  std::ostringstream line;
  List(line, "known", order);
  B().text.append("{").append(line.str(), 1).append("}\n");  // without its comma
}

uint64_t& Running() {
  thread_local uint64_t number = 0;
  return number;
}

void TraceAccesses(const std::vector<Access>& accesses) {
  if (!B().on || Running() == 0) return;
  std::ostringstream line;
  line << "{\"touched\":" << Running();
  Accesses(line, accesses);
  B().text += line.str();
}

void TraceWork(CUstream_st* stream, const Work& work) {
  if (!B().on) return;
  stream->order = {Line(*stream, work, stream->order, 0, 0)};
}

void TraceGraph(CUstream_st* stream, const CUgraph_st& graph, uint64_t executable) {
  if (!B().on) return;
  ++B().launched;
  stream->order = GraphLines(*stream, graph, stream->order, executable);
}

void BeginTrace() {
  LOCK;
  Book& book = B();
  book.on = true;
  book.text.clear();
  for (CUstream_st* stream : S().streams) stream->order.clear();
  for (CUevent_st* event : S().events) event->order.clear();
}

std::string EndTrace() {
  LOCK;
  B().on = false;
  return std::move(B().text);
}

}  // namespace dfx::fake
