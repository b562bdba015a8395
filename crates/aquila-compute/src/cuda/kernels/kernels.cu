// The kernels of the CUDA backend, as one unit. `build-kernels.sh` compiles it.
//
// The one invariant: what a row computes depends on that row alone. Every sum has an order that
// follows from the sizes of the model and from absolute positions, never from how many rows a launch
// has, so a row gives the same bits alone and among others.

#include "accept.cu"
#include "attend.cu"
#include "begin.cu"
#include "choose.cu"
#include "experts.cu"
#include "pack.cu"
#include "plain.cu"
#include "plans.cu"
#include "project_many.cu"
#include "project_middle.cu"
#include "project_skinny.cu"
#include "project_tiles.cu"
#include "project_wide.cu"
#include "random.cu"
#include "rows.cu"
#include "trees.cu"
#include "verify.cu"
