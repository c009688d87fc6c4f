// What the driver has to know of a PTX text: sizes of kernels' parameters, global variables.
// (The stand-in for ptxas leaves PTX as it is, so that no image is anything else.)
#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "exports.h"

namespace dfx::fake {
namespace {

// Bytes of `.u64`, `.f32`, `.b8`...: the digits at the end of a type's name.
size_t TypeBytes(const std::string& type) {
  if (type == ".pred") return 1;
  const size_t digits = type.find_first_of("0123456789");
  return digits == std::string::npos ? 0 : std::strtoul(type.c_str() + digits, nullptr, 10) / 8;
}

std::vector<std::string> Words(const std::string& text) {
  std::vector<std::string> words;
  size_t at = 0;
  while ((at = text.find_first_not_of(" \t\r\n", at)) != std::string::npos) {
    const size_t end = text.find_first_of(" \t\r\n", at);
    words.push_back(text.substr(at, end - at));
    at = end == std::string::npos ? text.size() : end;
  }
  return words;
}

// Bytes of a declaration such as `.param .align 16 .b8 name[128]` or `.global .u32 name`.
size_t DeclaredBytes(const std::string& declaration) {
  size_t bytes = 0;
  for (const std::string& word : Words(declaration)) {
    if (word[0] == '.' && bytes == 0) bytes = TypeBytes(word);
    if (const size_t bracket = word.find('['); bracket != std::string::npos && word[0] != '.') {
      const unsigned long n = std::strtoul(word.c_str() + bracket + 1, nullptr, 10);
      if (n != 0) bytes *= n;
    }
  }
  return bytes;
}

bool IsName(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$'; }

size_t EntryOf(const std::string& ptx, const std::string& kernel) {
  const std::string entry = ".entry " + kernel;
  size_t at = ptx.find(entry);
  while (at != std::string::npos && IsName(ptx[at + entry.size()])) at = ptx.find(entry, at + 1);
  return at;
}

}  // namespace

bool HasKernel(const std::string& ptx, const std::string& kernel) {
  return EntryOf(ptx, kernel) != std::string::npos;
}

std::vector<size_t> ParameterSizes(const std::string& ptx, const std::string& kernel) {
  std::vector<size_t> sizes;
  const size_t at = EntryOf(ptx, kernel);
  if (at == std::string::npos) return sizes;
  const size_t open = ptx.find('(', at), close = ptx.find(')', at), body = ptx.find('{', at);
  if (open == std::string::npos || open > body) return sizes;
  const std::string list = ptx.substr(open + 1, close - open - 1);
  for (size_t start = 0; start < list.size();) {
    const size_t comma = std::min(list.find(',', start), list.size());
    const size_t bytes = DeclaredBytes(list.substr(start, comma - start));
    if (bytes != 0) sizes.push_back(bytes);
    start = comma + 1;
  }
  return sizes;
}

bool GlobalOf(const std::string& ptx, const std::string& name, std::vector<char>* bytes) {
  for (size_t at = ptx.find(name); at != std::string::npos; at = ptx.find(name, at + 1)) {
    if (IsName(ptx[at + name.size()]) || (at > 0 && IsName(ptx[at - 1]))) continue;
    const size_t end = ptx.find(';', at);
    const size_t start = ptx.find_last_of(";}\n", at) + 1;
    const std::string text = ptx.substr(start, end - start);
    if (text.find(".global") == std::string::npos && text.find(".const") == std::string::npos) {
      continue;
    }
    const size_t equals = text.find('=');
    bytes->assign(DeclaredBytes(text.substr(0, equals)), 0);
    if (equals == std::string::npos) return !bytes->empty();
    size_t width = 0;
    for (const std::string& word : Words(text.substr(0, equals))) {
      if (word[0] == '.' && width == 0) width = TypeBytes(word);
    }
    const char* next = text.c_str() + text.find_first_of("{0123456789-", equals);
    for (size_t i = 0; width != 0 && i + width <= bytes->size(); i += width) {
      while (*next != 0 && *next != '-' && !std::isdigit(static_cast<unsigned char>(*next))) ++next;
      if (*next == 0) break;
      char* after = nullptr;
      const bool negative = *next == '-';
      const unsigned long long value = std::strtoull(next + (negative ? 1 : 0), &after, 0);
      const unsigned long long stored = negative ? 0 - value : value;
      std::memcpy(bytes->data() + i, &stored, width);
      next = after;
    }
    return true;
  }
  return false;
}

}  // namespace dfx::fake
