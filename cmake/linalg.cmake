# The kernels of dad_core/linalg, compiled once per CPU level. Sets LINALG_LEVEL_SOURCES and
# EIGEN3_INCLUDE_DIR.

find_path(EIGEN3_INCLUDE_DIR Eigen/Core PATH_SUFFIXES eigen3
  DOC "The folder with Eigen/Core")
if(NOT EIGEN3_INCLUDE_DIR)
  message(FATAL_ERROR "dad: Eigen 3.4 is not here. It is a library of headers: "
    "apt-get install libeigen3-dev, or -DEIGEN3_INCLUDE_DIR=<the folder with Eigen/Core>.")
endif()

# Only these files may use a level's instructions, and they come last on the linker's
# command line: of an inline function that several files have, the linker keeps the first.
set(LINALG_LEVEL_SOURCES
  ${PROJECT_SOURCE_DIR}/dad_core/linalg/kernels_avx2.cc
  ${PROJECT_SOURCE_DIR}/dad_core/linalg/kernels_avx512.cc)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # GCC 12 warns of its own AVX-512 header.
  set(avx2 -mavx2 -mfma -mf16c)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/dad_core/linalg/kernels_avx2.cc
    PROPERTIES COMPILE_OPTIONS "${avx2}")
  set_source_files_properties(${PROJECT_SOURCE_DIR}/dad_core/linalg/kernels_avx512.cc
    PROPERTIES COMPILE_OPTIONS "${avx2};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-Wno-maybe-uninitialized")
endif()
