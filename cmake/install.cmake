# `cmake --install build --prefix DIR`: the core, its public headers, the transport plug-ins and a
# CMake package, for C++ programs:
#
#   find_package(dad REQUIRED)
#   target_link_libraries(program PRIVATE dad::core)
#
# The Python package does not use this: setup.py puts the libraries into dad/_lib.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dad)

install(TARGETS dad_core EXPORT dadTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY dad_core/include/dad DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# Beside the core, which looks for them there.
foreach(plugin ${DAD_PLUGINS})
  install(TARGETS dad_${plugin} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endforeach()
if(TARGET dad_cuda)
  install(FILES ${DAD_CUDA_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR} OPTIONAL)
endif()
install(EXPORT dadTargets NAMESPACE dad:: DESTINATION ${package_dir})

# dadTargets.cmake is all there is to configure: the core needs no other package.
file(WRITE ${CMAKE_BINARY_DIR}/dadConfig.cmake
  "include(\"\${CMAKE_CURRENT_LIST_DIR}/dadTargets.cmake\")\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/dadConfigVersion.cmake
  VERSION ${DAD_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/dadConfig.cmake ${CMAKE_BINARY_DIR}/dadConfigVersion.cmake
  DESTINATION ${package_dir})
