# What of CUDA and NCCL is on this machine. Neither is needed to build or to use dad: the plug-in
# libdad_nccl.so is compiled without their headers and opens the libraries at run time. Where the
# headers are, the declarations are compared with them; where nvcc is, the kernels are compiled.
#
#   DAD_CUDA          OFF: leave out what needs nvcc
#   CUDA_INCLUDE_DIR  the folder with cuda_runtime_api.h
#   NCCL_INCLUDE_DIR  the folder with nccl.h; from the package nvidia-nccl-cu13, libnccl-dev, or
#                     build/gpu, where scripts/setup.sh puts it
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
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${python_nccl} ${PROJECT_SOURCE_DIR}/build/gpu/include)

if(CUDA_INCLUDE_DIR AND NCCL_INCLUDE_DIR)
  message(STATUS "dad: declarations of CUDA and NCCL are checked against ${NCCL_INCLUDE_DIR}")
else()
  message(STATUS "dad: no headers of CUDA and NCCL here; the NCCL plug-in is built without checking its declarations against them")
endif()
