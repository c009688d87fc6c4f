// How far two cores are from each other.
#pragma once

namespace dfx {

// Nanoseconds for which a cache line goes to another core and back: a few tens within a core
// complex, hundreds between two of them. A hypervisor may move a virtual machine's cores from the
// one to the other while it runs, and what threads share takes longer then. The best of several
// tries; 0 where the caller has one core only, no thread could be started, or the machine is so
// busy that both never run at once. Takes 0.1 to 1 ms; on a busy machine 10, and until the other
// thread has run once more on its core.
double RoundTripNs() noexcept;

}  // namespace dfx
