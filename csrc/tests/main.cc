#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <unistd.h>

int main(int argc, char** argv) {
  alarm(240);  // a deadlock ends the process instead of the day
  return doctest::Context(argc, argv).run();
}
