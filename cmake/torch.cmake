# The PyTorch ops, dad._lib._torch, for the torch that Python_EXECUTABLE imports.
#
# The interpreter is asked for paths; find_package(Torch) would want a CUDA toolkit
# whenever torch was built with CUDA, and these ops need none.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import os, torch
root = os.path.dirname(torch.__file__)
print(torch.__version__, root, int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')
"
  OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "DAD_TORCH=ON, but ${Python_EXECUTABLE} cannot import torch")
endif()
list(GET answer 0 DAD_TORCH_VERSION)
list(GET answer 1 torch_root)
list(GET answer 2 torch_cxx11_abi)

file(GLOB torch_sources CONFIGURE_DEPENDS torch_ops/*/*.cc)
if(torch_sources)
  # What needs no Python; the tests on the recording fake link it, too.
  add_library(dad_torch_parts OBJECT)
  foreach(part capture/convolution capture/embedding capture/graph capture/linear capture/node
      capture/norm capture/registry capture/rows device/device_stream ops/tensor_adapter)
    target_sources(dad_torch_parts PRIVATE torch_ops/${part}.cc)
    list(FILTER torch_sources EXCLUDE REGEX "/${part}\\.cc$")
  endforeach()
  dad_target(dad_torch_parts)
  target_link_libraries(dad_torch_parts PRIVATE dad_core)

  dad_add_python_module(dad_torch _torch ${torch_sources} $<TARGET_OBJECTS:dad_torch_parts>)
  foreach(target dad_torch_parts dad_torch)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_include_directories(${target} SYSTEM PRIVATE
      ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
    target_compile_definitions(${target} PRIVATE
      _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi} TORCH_EXTENSION_NAME=_torch)
  endforeach()
  # torch is imported before this library is loaded, so no path to it is recorded.
  foreach(name torch torch_cpu torch_python c10)
    target_link_libraries(dad_torch PRIVATE ${torch_root}/lib/lib${name}.so)
  endforeach()
endif()
