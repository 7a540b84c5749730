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

file(GLOB torch_sources CONFIGURE_DEPENDS torch_ops/*.cc)
if(torch_sources)
  dad_add_python_module(dad_torch _torch ${torch_sources})
  target_include_directories(dad_torch SYSTEM PRIVATE
    ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
  target_compile_definitions(dad_torch PRIVATE
    _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi} TORCH_EXTENSION_NAME=_torch)
  # torch is imported before this library is loaded, so no path to it is recorded.
  foreach(name torch torch_cpu torch_python c10)
    target_link_libraries(dad_torch PRIVATE ${torch_root}/lib/lib${name}.so)
  endforeach()
endif()
