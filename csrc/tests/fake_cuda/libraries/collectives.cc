// libnccl.so.2 for the devices of one process: communicators, collectives, sends. Each is an
// operation of the rank's stream that waits for the others' there, as on devices; the last to come
// computes. Communicators that are split from others are missing, and say so.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

struct CUstream_st;
DFX_EXPORT int fake_enqueue(const char* name, CUstream_st* stream, int (*run)(void*),
                            void (*drop)(void*), void* data, const uint64_t* accesses, int n);
DFX_EXPORT int fake_current_device();
DFX_EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes);
DFX_EXPORT int cuMemFree_v2(uint64_t address);

namespace {

constexpr int kInvalidArgument = 4;
constexpr auto kPatience = std::chrono::seconds(60);  // then some rank does not come

enum Type { kI8, kU8, kI32, kU32, kI64, kU64, kF16, kF32, kF64, kBf16, kF8a, kF8b, kTypes };
constexpr size_t kBytes[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum Op { kSum, kProduct, kMax, kMin, kAverage };

struct Arrival {
  const char* send;
  char* receive;
};

// What the ranks of one communicator share.
struct Group {
  explicit Group(int n) : ranks(n), done(static_cast<size_t>(n)) {}
  const int ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<uint64_t> done;                         // collectives, by rank
  std::map<uint64_t, std::map<int, Arrival>> coming;  // by the collective's number
  std::map<uint64_t, int> over;                       // ranks that have not seen its end
  std::map<std::pair<int, int>, std::vector<std::vector<char>>> mail;  // by sender and receiver
};

struct Unique {
  char bytes[128];
};

struct Communicator {
  std::shared_ptr<Group> group;
  int rank = 0;
  int device = 0;
};

// All ranks come together; the last one does the work.
bool Meet(Group& group, int rank, Arrival mine,
          const std::function<void(const std::vector<Arrival>&)>& work) {
  std::unique_lock<std::mutex> lock(group.mutex);
  const uint64_t number = group.done[static_cast<size_t>(rank)]++;
  group.coming[number][rank] = mine;
  if (group.coming[number].size() == static_cast<size_t>(group.ranks)) {
    std::vector<Arrival> all;
    for (const auto& [_, arrival] : group.coming[number]) all.push_back(arrival);
    work(all);
    group.coming.erase(number);
    group.over[number] = group.ranks - 1;
    group.changed.notify_all();
    if (group.ranks == 1) group.over.erase(number);
    return true;
  }
  if (!group.changed.wait_for(lock, kPatience, [&] { return group.over.count(number) != 0; })) {
    return false;
  }
  if (--group.over[number] == 0) group.over.erase(number);
  return true;
}

float Float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T Get(const char* from, size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof value, sizeof value);
  return value;
}

// Numbers are added as the type itself, but bfloat16 as float.
template <typename T>
T Combine(int op, T a, T b) {
  switch (op) {
    case kProduct:
      return static_cast<T>(a * b);
    case kMax:
      return a > b ? a : b;
    case kMin:
      return a < b ? a : b;
    default:
      return static_cast<T>(a + b);
  }
}

template <typename T>
void ReduceAs(const std::vector<Arrival>& all, char* to, size_t first, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    T value = Get<T>(all[0].send, first + i);
    for (size_t r = 1; r < all.size(); ++r) {
      value = Combine(op, value, Get<T>(all[r].send, first + i));
    }
    if (op == kAverage) value = static_cast<T>(value / static_cast<T>(all.size()));
    std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
}

void ReduceBf16(const std::vector<Arrival>& all, char* to, size_t first, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    auto at = [&](size_t r) {
      return Float(static_cast<uint32_t>(Get<uint16_t>(all[r].send, first + i)) << 16);
    };
    float value = at(0);
    for (size_t r = 1; r < all.size(); ++r) value = Combine(op, value, at(r));
    if (op == kAverage) value /= static_cast<float>(all.size());
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto rounded = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    std::memcpy(to + i * sizeof rounded, &rounded, sizeof rounded);
  }
}

bool Reduce(const std::vector<Arrival>& all, char* to, size_t first, size_t count, int type,
            int op) {
  switch (type) {
    case kI8:
      return ReduceAs<int8_t>(all, to, first, count, op), true;
    case kU8:
      return ReduceAs<uint8_t>(all, to, first, count, op), true;
    case kI32:
      return ReduceAs<int32_t>(all, to, first, count, op), true;
    case kU32:
      return ReduceAs<uint32_t>(all, to, first, count, op), true;
    case kI64:
      return ReduceAs<int64_t>(all, to, first, count, op), true;
    case kU64:
      return ReduceAs<uint64_t>(all, to, first, count, op), true;
    case kF32:
      return ReduceAs<float>(all, to, first, count, op), true;
    case kF64:
      return ReduceAs<double>(all, to, first, count, op), true;
    case kBf16:
      return ReduceBf16(all, to, first, count, op), true;
    default:
      return false;
  }
}

using Run = std::function<bool()>;

int Enqueue(const char* name, CUstream_st* stream, Run run, const void* send, size_t sent,
            const void* receive, size_t received) {
  const uint64_t accesses[] = {reinterpret_cast<uint64_t>(send),    sent,     0,
                               reinterpret_cast<uint64_t>(receive), received, 1};
  auto call = [](void* data) { return (*static_cast<Run*>(data))() ? 0 : 1; };
  auto drop = [](void* data) { delete static_cast<Run*>(data); };
  return fake_enqueue(name, stream, call, drop, new Run(std::move(run)), accesses, 2);
}

// Results are made aside: a rank's send may be its receive.
int Collective(const char* name, const Communicator* of, CUstream_st* stream, const void* send,
               size_t sent, void* receive, size_t received,
               std::function<bool(const std::vector<Arrival>&, int rank, char* to)> make) {
  Run run = [group = of->group, rank = of->rank, send, receive, received, make] {
    bool sound = true;
    const Arrival mine = {static_cast<const char*>(send), static_cast<char*>(receive)};
    const bool met = Meet(*group, rank, mine, [&](const std::vector<Arrival>& all) {
      std::vector<std::vector<char>> made(all.size(), std::vector<char>(received));
      for (size_t r = 0; r < all.size(); ++r) {
        sound = sound && make(all, static_cast<int>(r), made[r].data());
      }
      for (size_t r = 0; r < all.size(); ++r) {
        if (all[r].receive != nullptr) std::memcpy(all[r].receive, made[r].data(), received);
      }
    });
    return met && sound;
  };
  return Enqueue(name, stream, std::move(run), send, sent, receive, received);
}

struct Books {
  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<Group>> groups;
  uint64_t ids = 0;
};
Books& B() {
  static auto* books = new Books;
  return *books;
}

int Init(Communicator** made, int ranks, const Unique& id, int rank) {
  if (rank < 0 || rank >= ranks) return kInvalidArgument;
  uint64_t number;
  std::memcpy(&number, id.bytes, sizeof number);
  std::lock_guard<std::mutex> lock(B().mutex);
  std::shared_ptr<Group>& group = B().groups[number];
  if (group == nullptr) group = std::make_shared<Group>(ranks);
  if (group->ranks != ranks) return kInvalidArgument;
  *made = new Communicator{group, rank, fake_current_device()};
  return 0;
}

size_t Size(int type) { return type >= 0 && type < kTypes ? kBytes[type] : 0; }

}  // namespace

DFX_EXPORT int ncclGetVersion(int* version) {
  *version = 22803;
  return 0;
}
DFX_EXPORT const char* ncclGetErrorString(int status) {
  return status == 0 ? "no error" : "an error of the stand-in for NCCL";
}
DFX_EXPORT const char* ncclGetLastError(Communicator*) { return "of the stand-in for NCCL"; }
DFX_EXPORT int ncclGetUniqueId(Unique* id) {
  std::lock_guard<std::mutex> lock(B().mutex);
  std::memset(id, 0, sizeof *id);
  const uint64_t number = ++B().ids;
  std::memcpy(id->bytes, &number, sizeof number);
  return 0;
}
DFX_EXPORT int ncclCommInitRank(Communicator** made, int ranks, Unique id, int rank) {
  return Init(made, ranks, id, rank);
}
DFX_EXPORT int ncclCommInitRankConfig(Communicator** made, int ranks, Unique id, int rank, void*) {
  return Init(made, ranks, id, rank);
}
DFX_EXPORT int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int n,
                                        Unique* ids, void*) {
  return n < 1 ? kInvalidArgument : Init(made, ranks, ids[0], rank);
}
DFX_EXPORT int ncclCommCount(const Communicator* of, int* n) {
  *n = of->group->ranks;
  return 0;
}
DFX_EXPORT int ncclCommUserRank(const Communicator* of, int* rank) {
  *rank = of->rank;
  return 0;
}
DFX_EXPORT int ncclCommCuDevice(const Communicator* of, int* device) {
  *device = of->device;
  return 0;
}
DFX_EXPORT int ncclCommGetAsyncError(Communicator*, int* status) {
  *status = 0;
  return 0;
}
DFX_EXPORT int ncclCommFinalize(Communicator*) { return 0; }
DFX_EXPORT int ncclCommDestroy(Communicator* of) {
  delete of;
  return 0;
}
DFX_EXPORT int ncclCommAbort(Communicator* of) { return ncclCommDestroy(of); }
DFX_EXPORT int ncclCommRegister(Communicator*, void*, size_t, void** handle) {
  *handle = nullptr;
  return 0;
}
DFX_EXPORT int ncclCommDeregister(Communicator*, void*) { return 0; }
DFX_EXPORT int ncclCommWindowRegister(Communicator*, void*, size_t, void** window, int) {
  *window = nullptr;
  return 0;
}
DFX_EXPORT int ncclCommWindowDeregister(Communicator*, void*) { return 0; }
DFX_EXPORT int ncclMemAlloc(void** memory, size_t bytes) {
  return cuMemAlloc_v2(reinterpret_cast<uint64_t*>(memory), bytes);
}
DFX_EXPORT int ncclMemFree(void* memory) {
  return cuMemFree_v2(reinterpret_cast<uint64_t>(memory));
}

// Sends and receives of a group are one operation: none waits for another. So at its end the sends
// come first, which wait for nothing. Collectives are begun at once.
static thread_local int groups = 0;
static thread_local std::vector<std::function<int()>> sends, receives;

static int Later(std::vector<std::function<int()>>* list, std::function<int()> begin) {
  if (groups == 0) return begin();
  list->push_back(std::move(begin));
  return 0;
}

DFX_EXPORT int ncclGroupStart() {
  ++groups;
  return 0;
}
DFX_EXPORT int ncclGroupEnd() {
  if (--groups > 0) return 0;
  int status = 0;
  for (auto* list : {&sends, &receives}) {
    for (const auto& begin : *list) status = status != 0 ? status : begin();
    list->clear();
  }
  return status;
}

DFX_EXPORT int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op,
                             Communicator* of, CUstream_st* stream) {
  const size_t bytes = count * Size(type);
  return Collective("ncclAllReduce", of, stream, send, bytes, receive, bytes,
                    [=](const std::vector<Arrival>& all, int, char* to) {
                      return Reduce(all, to, 0, count, type, op);
                    });
}

DFX_EXPORT int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op,
                                 Communicator* of, CUstream_st* stream) {
  const size_t bytes = count * Size(type), ranks = static_cast<size_t>(of->group->ranks);
  return Collective("ncclReduceScatter", of, stream, send, bytes * ranks, receive, bytes,
                    [=](const std::vector<Arrival>& all, int rank, char* to) {
                      return Reduce(all, to, static_cast<size_t>(rank) * count, count, type, op);
                    });
}

DFX_EXPORT int ncclAllGather(const void* send, void* receive, size_t count, int type,
                             Communicator* of, CUstream_st* stream) {
  const size_t bytes = count * Size(type), ranks = static_cast<size_t>(of->group->ranks);
  return Collective("ncclAllGather", of, stream, send, bytes, receive, bytes * ranks,
                    [=](const std::vector<Arrival>& all, int, char* to) {
                      for (size_t r = 0; r < all.size(); ++r) {
                        std::memcpy(to + r * bytes, all[r].send, bytes);
                      }
                      return true;
                    });
}

DFX_EXPORT int ncclAlltoAll(const void* send, void* receive, size_t count, int type,
                            Communicator* of, CUstream_st* stream) {
  const size_t bytes = count * Size(type), ranks = static_cast<size_t>(of->group->ranks);
  return Collective("ncclAlltoAll", of, stream, send, bytes * ranks, receive, bytes * ranks,
                    [=](const std::vector<Arrival>& all, int rank, char* to) {
                      for (size_t r = 0; r < all.size(); ++r) {
                        const size_t from = static_cast<size_t>(rank) * bytes;
                        std::memcpy(to + r * bytes, all[r].send + from, bytes);
                      }
                      return true;
                    });
}

DFX_EXPORT int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root,
                             Communicator* of, CUstream_st* stream) {
  const size_t bytes = count * Size(type);
  return Collective("ncclBroadcast", of, stream, send, bytes, receive, bytes,
                    [=](const std::vector<Arrival>& all, int, char* to) {
                      std::memcpy(to, all[static_cast<size_t>(root)].send, bytes);
                      return true;
                    });
}

DFX_EXPORT int ncclSend(const void* send, size_t count, int type, int peer, Communicator* of,
                        CUstream_st* stream) {
  const size_t bytes = count * Size(type);
  Run run = [group = of->group, rank = of->rank, send, bytes, peer] {
    const char* from = static_cast<const char*>(send);
    std::lock_guard<std::mutex> lock(group->mutex);
    group->mail[{rank, peer}].emplace_back(from, from + bytes);
    group->changed.notify_all();
    return true;
  };
  return Later(&sends, [=] { return Enqueue("ncclSend", stream, run, send, bytes, nullptr, 0); });
}

DFX_EXPORT int ncclRecv(void* receive, size_t count, int type, int peer, Communicator* of,
                        CUstream_st* stream) {
  const size_t bytes = count * Size(type);
  Run run = [group = of->group, rank = of->rank, receive, bytes, peer] {
    std::unique_lock<std::mutex> lock(group->mutex);
    auto& mail = group->mail[{peer, rank}];
    if (!group->changed.wait_for(lock, kPatience, [&] { return !mail.empty(); })) return false;
    const bool fits = mail.front().size() == bytes;
    if (fits) std::memcpy(receive, mail.front().data(), bytes);
    mail.erase(mail.begin());
    return fits;
  };
  return Later(&receives,
               [=] { return Enqueue("ncclRecv", stream, run, nullptr, 0, receive, bytes); });
}
