// Attention of rows to keys that they share and to the keys on their own paths.
#pragma once

#include "attention_rows.h"

namespace fastgen {

// The first `keys` slots are seen by all rows of a sentence. The bias goes on where they end: with the path.
struct PathAttention : Attention {
  const int32_t* paths; // [batch * beams, depth]: slots, in order; a negative number ends a path
  int64_t paths_row, depth;

  const int32_t* path_of(int64_t sentence, int64_t beam) const { return paths + (sentence * beams + beam) * paths_row; }

  int64_t length_of(const int32_t* path) const {
    return std::find_if(path, path + depth, [](int32_t slot) { return slot < 0; }) - path;
  }
};

} // namespace fastgen
