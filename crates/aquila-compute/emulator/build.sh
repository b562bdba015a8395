#!/bin/bash
# Builds the emulated driver: a libcuda.so that runs the kernels of this crate on a CPU.
#
#   crates/aquila-compute/emulator/build.sh FOLDER [CAPABILITY]
#
# CAPABILITY is 90 (Hopper) or 80 (the kernels that every GPU runs). A program that finds the library
# before a real one runs on it: LD_LIBRARY_PATH=FOLDER.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?the folder that gets libcuda.so}
capability=${2:-90}
mkdir -p "$out"
# As the kernels are compiled for a GPU: no contraction but where `fmaf` says so.
options=(-std=c++17 -O3 -g -march=native -ffp-contract=off -fno-strict-aliasing -fPIC -fvisibility=hidden
    -Wall -Wno-psabi -Wno-unused-variable -Wno-unknown-pragmas -Wno-sign-compare -Wno-unused-function -Wno-maybe-uninitialized -Wno-uninitialized
    -D__CUDA_ARCH__="${capability}0" -I"$here" -I"$here/../src/cuda/kernels")
for file in kernels threads driver; do
    g++ "${options[@]}" -c "$here/$file.cpp" -o "$out/$file.o" &
    jobs="${jobs:-} $!"
done
for job in $jobs; do wait "$job"; done
g++ -shared -o "$out/libcuda.so" "$out"/{kernels,threads,driver}.o -lpthread
rm "$out"/{kernels,threads,driver}.o
