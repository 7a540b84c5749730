# What of CUDA, NCCL and cuBLAS is on this machine. None is needed to build or to use dad, which is
# compiled without their headers and opens the libraries at run time. Where the headers are, the
# declarations are compared with them; where nvcc is, the kernels are compiled.
#
#   DAD_CUDA          OFF: leave out what needs nvcc
#   CUDA_INCLUDE_DIR  the folder with cuda_runtime_api.h
#   NCCL_INCLUDE_DIR  the folder with nccl.h; from the package nvidia-nccl-cu13, libnccl-dev, or
#                     build/gpu, where scripts/setup.sh puts it
#   CUBLAS_INCLUDE_DIR  the folder with cublas_v2.h; from the toolkit, the package nvidia-cublas, or
#                     build/gpu
set(DAD_CUDA_VERSION "")  # of the nvcc that compiles the kernels
option(DAD_CUDA "Compile the CUDA kernels where nvcc is found" ON)

find_program(NVCC nvcc HINTS /usr/local/cuda/bin)
if(NVCC)
  get_filename_component(cuda_root "${NVCC}" REALPATH)
  get_filename_component(cuda_root "${cuda_root}" DIRECTORY)
endif()
find_path(CUDA_INCLUDE_DIR cuda_runtime_api.h
  HINTS "${cuda_root}/../include" "${cuda_root}/../targets/x86_64-linux/include" /usr/local/cuda/include)
if(Python_EXECUTABLE)
  get_filename_component(python_root ${Python_EXECUTABLE} DIRECTORY)
  file(GLOB python_nccl ${python_root}/../lib/python3*/site-packages/nvidia/nccl/include)
  file(GLOB python_cublas ${python_root}/../lib/python3*/site-packages/nvidia/cu13/include)
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${python_nccl} ${PROJECT_SOURCE_DIR}/build/gpu/include)
find_path(CUBLAS_INCLUDE_DIR cublas_v2.h
  HINTS ${CUDA_INCLUDE_DIR} ${python_cublas} ${PROJECT_SOURCE_DIR}/build/gpu/include)

if(CUDA_INCLUDE_DIR AND NCCL_INCLUDE_DIR)
  message(STATUS "dad: declarations of CUDA and NCCL are checked against ${NCCL_INCLUDE_DIR}")
else()
  message(STATUS "dad: no headers of CUDA and NCCL here; the NCCL plug-in is built without checking its declarations against them")
endif()
if(CUDA_INCLUDE_DIR AND CUBLAS_INCLUDE_DIR)
  set(cublas_check ${PROJECT_SOURCE_DIR}/dad_core/device/cublas_abi_check.cc)
  target_sources(dad_core_objects PRIVATE ${cublas_check})
  set_source_files_properties(${cublas_check} PROPERTIES
    INCLUDE_DIRECTORIES "${CUDA_INCLUDE_DIR};${CUBLAS_INCLUDE_DIR}")
  message(STATUS "dad: declarations of cuBLAS are checked against ${CUBLAS_INCLUDE_DIR}")
else()
  message(STATUS "dad: no headers of cuBLAS here; its declarations are not checked against them")
endif()

# libdad_cuda.so: the kernels of dad_core/codec/cuda, with their C face; linked to nothing of dad.
# nvcc is called by hand: enable_language(CUDA) would make it a condition of the whole build.
if(NVCC AND DAD_CUDA AND NOT DAD_SANITIZE)
  file(GLOB cuda_files CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/dad_core/codec/cuda/*.h ${PROJECT_SOURCE_DIR}/dad_core/codec/cuda/*.cu)
  set(DAD_CUDA_LIBRARY ${DAD_LIB_DIR}/libdad_cuda.so)
  # No contraction: the bits of the CPU. The newest architecture also as PTX, for GPUs to come.
  add_custom_command(OUTPUT ${DAD_CUDA_LIBRARY}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${DAD_LIB_DIR}
    COMMAND ${NVCC} -std=c++17 -O3 --fmad=false -shared -cudart static
      -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90
      -gencode arch=compute_90,code=compute_90
      -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-ffp-contract=off
      -I${PROJECT_SOURCE_DIR}/dad_core -o ${DAD_CUDA_LIBRARY}
      ${PROJECT_SOURCE_DIR}/dad_core/codec/cuda/launch.cu
    DEPENDS ${cuda_files} COMMENT "Building CUDA library libdad_cuda.so" VERBATIM)
  add_custom_target(dad_cuda ALL DEPENDS ${DAD_CUDA_LIBRARY})
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE DAD_CUDA_VERSION ERROR_QUIET)
  string(REGEX REPLACE ".*release ([0-9.]+).*" "\\1" DAD_CUDA_VERSION "${DAD_CUDA_VERSION}")
  message(STATUS "dad: CUDA kernels are compiled with ${NVCC}")
elseif(NOT NVCC)
  message(STATUS "dad: no nvcc here; the CUDA kernels are left out (their logic is tested on the host)")
endif()
