# How dad's own targets are compiled: they link dad_build_options. Users of dad::core get none of
# these flags, only the C++ standard that the public headers need.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(CCACHE ccache)
if(CCACHE)
  # NOHASHDIR and BASEDIR: build/, pip's build folder and other clones share what they compile.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_NOHASHDIR=1 CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${CCACHE})
endif()

add_library(dad_build_options INTERFACE)
target_compile_features(dad_build_options INTERFACE cxx_std_20)
# -ffp-contract=off: the same bits on every rank, whatever the compiler's default.
target_compile_options(dad_build_options INTERFACE -Wall -Wextra -ffp-contract=off
  # Optimised code keeps line tables, so that a backtrace has line numbers. Never -march=native:
  # the library may run on a CPU with fewer instructions, so kernels are chosen at run time.
  $<$<CONFIG:Release>:-O3;-g1>)
if(DAD_SANITIZE)
  set(sanitize -fsanitize=${DAD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1)
  target_compile_options(dad_build_options INTERFACE ${sanitize})
  target_link_options(dad_build_options INTERFACE ${sanitize})
else()
  # A missing function is an error of the build, not of the first import.
  target_link_options(dad_build_options INTERFACE
    $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,SHARED_LIBRARY>:-Wl,--no-undefined>)
endif()

# dad_target(NAME): the properties of every target that is compiled here.
function(dad_target name)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:dad_build_options>)
  set_target_properties(${name} PROPERTIES
    CXX_EXTENSIONS OFF
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    LIBRARY_OUTPUT_DIRECTORY ${DAD_LIB_DIR}
    # Libraries find each other beside themselves, wherever the folder is copied to.
    BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "$ORIGIN")
endfunction()

# dad_program(NAME): a test or benchmark. It contains the core, since libdad_core hides its
# internals, and exports it to the plug-ins that it opens, so that the process has one core.
function(dad_program name)
  dad_target(${name})
  target_sources(${name} PRIVATE $<TARGET_OBJECTS:dad_core_objects>)
  target_include_directories(${name} PRIVATE
    ${PROJECT_SOURCE_DIR}/dad_core ${PROJECT_SOURCE_DIR}/dad_core/include)
  target_link_libraries(${name} PRIVATE dad_crypto Threads::Threads ${CMAKE_DL_LIBS})
  set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON INSTALL_RPATH "${DAD_LIB_DIR}")
  foreach(plugin ${DAD_PLUGINS})
    add_dependencies(${name} dad_${plugin})
  endforeach()
endfunction()
