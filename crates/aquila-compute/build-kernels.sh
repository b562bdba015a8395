#!/bin/bash
# Compiles the CUDA kernels and leaves them, compressed, where the crate includes them: machine code
# for Hopper (sm_90a), and PTX that the driver of any GPU from sm_80 on compiles.
#
#   crates/aquila-compute/build-kernels.sh [--check|--usage]
#
# NVCC names the compiler; without it, nvcc comes from PyPI's wheels into .cuda/, which needs no GPU;
# exits with 3 where those cannot be had. --check compares what comes out with what is shipped, --usage
# prints what registers and memory the kernels take; both leave nothing behind.
set -euo pipefail
cd "$(dirname "$0")"
root=$(git rev-parse --show-toplevel)
sources=src/cuda/kernels
built=$sources/built

if [ -z "${NVCC:-}" ]; then
    venv=$root/.cuda/venv
    if [ ! -x "$venv/bin/python3" ]; then
        python3 -m venv "$venv"
        "$venv/bin/pip" install --quiet --disable-pip-version-check \
            nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
            nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 ||
            { rm -rf "$venv"; echo "not compiled: nvcc's wheels are not to be had"; exit 3; }
    fi
    NVCC=$(ls "$venv"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
fi

# Multiplications and additions are contracted only where the sources say `fmaf`.
options=(-std=c++17 -I $sources -O3 --fmad=false -Werror all-warnings)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
if [ "${1:-}" = --usage ]; then
    "$NVCC" "${options[@]}" -Xptxas -v -cubin -gencode=arch=compute_90a,code=sm_90a $sources/kernels.cu -o "$out/sm_90a.cubin"
    exit
fi
"$NVCC" "${options[@]}" -cubin -gencode=arch=compute_90a,code=sm_90a $sources/kernels.cu -o "$out/sm_90a.cubin"
"$NVCC" "${options[@]}" -ptx -arch=compute_80 $sources/kernels.cu -o "$out/sm_80.ptx"
if [ "${1:-}" = --check ]; then
    for image in sm_90a.cubin sm_80.ptx; do
        zstd -q -d -c $built/$image.zst | cmp - "$out/$image"
    done
    echo "the kernels that are shipped are those of the sources, byte for byte"
    exit
fi
mkdir -p $built
zstd -q -19 -f "$out/sm_90a.cubin" -o $built/sm_90a.cubin.zst
zstd -q -19 -f "$out/sm_80.ptx" -o $built/sm_80.ptx.zst
# The hash that a test compares: of all sources, in the order of their names.
(cd $sources && LC_ALL=C cat $(LC_ALL=C ls *.cu *.cuh)) | sha256sum | cut -d' ' -f1 > $built/sources.sha256
ls -l $built
