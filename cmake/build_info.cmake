# Records what was built, for `dadrun --check-build` and for the check that an op library
# is loaded with the framework it was built for; and prints it.
set(frameworks "")
if(TARGET dad_torch)
  list(APPEND frameworks "torch ${DAD_TORCH_VERSION}")
else()
  set(DAD_TORCH_VERSION "")
endif()
if(TARGET dad_tensorflow)
  list(APPEND frameworks "tensorflow ${DAD_TENSORFLOW_VERSION}")
endif()

function(json_list out)
  list(TRANSFORM ARGN REPLACE "(.+)" "\"\\1\"")
  string(REPLACE ";" ", " text "${ARGN}")
  set(${out} "[${text}]" PARENT_SCOPE)
endfunction()
function(json_string out text)
  if(text)
    set(${out} "\"${text}\"" PARENT_SCOPE)
  else()
    set(${out} null PARENT_SCOPE)
  endif()
endfunction()
json_list(plugins ${DAD_PLUGINS})
json_string(torch "${DAD_TORCH_VERSION}")
json_string(tensorflow "${DAD_TENSORFLOW_VERSION}")
json_string(cuda "${DAD_CUDA_VERSION}")

file(WRITE ${CMAKE_BINARY_DIR}/build_info.json "{
  \"dad\": \"${DAD_VERSION}\",
  \"torch\": ${torch},
  \"tensorflow\": ${tensorflow},
  \"plugins\": ${plugins},
  \"cuda\": ${cuda},
  \"compiler\": \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\",
  \"build_type\": \"${CMAKE_BUILD_TYPE}\",
  \"sanitize\": \"${DAD_SANITIZE}\"
}
")
configure_file(${CMAKE_BINARY_DIR}/build_info.json ${DAD_LIB_DIR}/build_info.json COPYONLY)

if(NOT frameworks)
  set(frameworks none)
endif()
string(REPLACE ";" ", " frameworks "${frameworks}")
string(REPLACE ";" ", " plugin_names "${DAD_PLUGINS}")
message(STATUS "dad ${DAD_VERSION}: frameworks: ${frameworks}; transports: ${plugin_names}")
message(STATUS "dad ${DAD_VERSION}: libraries go to ${DAD_LIB_DIR}")
