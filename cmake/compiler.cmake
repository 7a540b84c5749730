# How everything is compiled.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
# Line tables, so that a backtrace has line numbers. Never -march=native: what is
# built here may run on a CPU with fewer instructions; kernels choose at run time.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1 -DNDEBUG")

find_program(CCACHE ccache)
if(CCACHE)
  # NOHASHDIR: build/ and pip's build folder share what they compile.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

# Libraries find each other beside themselves, wherever the folder is copied to.
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${DAD_LIB_DIR})
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN")

# Same bits on every rank: no contraction, whatever the compiler's default.
add_compile_options(-Wall -Wextra -ffp-contract=off)

if(DAD_SANITIZE)
  set(flags -fsanitize=${DAD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1)
  add_compile_options(${flags})
  add_link_options(${flags})
else()
  # A missing function is an error of the build, not of the first import.
  set(CMAKE_SHARED_LINKER_FLAGS "${CMAKE_SHARED_LINKER_FLAGS} -Wl,--no-undefined")
endif()
