# The core as a Python module, dad._lib._core: knows no framework.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)

# pybind11 is headers only: from pip, from torch (which ships a copy), or from the system.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, os
for name, folder in (('pybind11', 'include'), ('torch', 'include')):
    spec = importlib.util.find_spec(name)
    if spec: print(os.path.join(os.path.dirname(spec.origin), folder))
"
  OUTPUT_VARIABLE hints OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REPLACE "\n" ";" hints "${hints}")
find_path(PYBIND11_INCLUDE_DIR pybind11/pybind11.h HINTS ${hints} REQUIRED)

# dad_add_python_module(TARGET FILE_NAME SOURCES...): becomes dad._lib.FILE_NAME.
function(dad_add_python_module target file_name)
  Python_add_library(${target} MODULE WITH_SOABI ${ARGN})
  dad_target(${target})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${file_name})
  target_link_libraries(${target} PRIVATE dad_core)
endfunction()

file(GLOB binding_sources CONFIGURE_DEPENDS python/bindings/*.cc)
if(DAD_PYTHON AND binding_sources)
  dad_add_python_module(_core _core ${binding_sources})
  target_include_directories(_core SYSTEM PRIVATE ${PYBIND11_INCLUDE_DIR})
endif()
