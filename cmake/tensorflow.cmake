# The TensorFlow ops, libdad_tensorflow.so, for the TensorFlow that Python_EXECUTABLE imports.
#
# Importing TensorFlow takes seconds, so it is asked once: again when its files have changed.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import importlib.util, os
spec = importlib.util.find_spec('tensorflow')
print(spec.origin, os.path.getmtime(spec.origin))
"
  OUTPUT_VARIABLE key OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(NOT failed AND NOT key STREQUAL "${DAD_TENSORFLOW_KEY}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
      ${Python_EXECUTABLE} -c "
import os, tensorflow as tf
print('found', tf.__version__, tf.sysconfig.get_include(), os.path.dirname(tf.__file__),
      *[f for f in tf.sysconfig.get_compile_flags() if f.startswith('-D')], sep=';')
"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  # A plug-in of TensorFlow may have printed something first.
  string(REGEX REPLACE ".*found;" "" answer "${answer}")
  set(DAD_TENSORFLOW_ANSWER "${answer}" CACHE INTERNAL "version, includes, package, definitions")
  set(DAD_TENSORFLOW_KEY "${key}" CACHE INTERNAL "what the answer is for")
endif()
if(failed)
  unset(DAD_TENSORFLOW_KEY CACHE)
  message(FATAL_ERROR "DAD_TENSORFLOW=ON, but ${Python_EXECUTABLE} cannot import tensorflow")
endif()
set(answer ${DAD_TENSORFLOW_ANSWER})
list(POP_FRONT answer DAD_TENSORFLOW_VERSION tensorflow_include tensorflow_root)
set(tensorflow_definitions ${answer})

file(GLOB tensorflow_sources CONFIGURE_DEPENDS
  tf_ops/ops/*.cc tf_ops/kernels/*.cc tf_ops/plan/*.cc)
add_library(dad_tensorflow SHARED ${tensorflow_sources})
dad_target(dad_tensorflow)
target_include_directories(dad_tensorflow PRIVATE ${PROJECT_SOURCE_DIR})
target_include_directories(dad_tensorflow SYSTEM PRIVATE ${tensorflow_include})
target_compile_options(dad_tensorflow PRIVATE ${tensorflow_definitions})
# TensorFlow is imported before this library is loaded, so no path to it is recorded.
file(GLOB tensorflow_framework ${tensorflow_root}/libtensorflow_framework.so.*)
target_link_libraries(dad_tensorflow PRIVATE dad_core ${tensorflow_framework})

# Kernels for GPUs, libdad_tensorflow_gpu.so: loaded where TensorFlow was built with CUDA, whose headers
# are the same. What is under them, with its counters, is in libdad_tensorflow, and once in a process.
file(GLOB tensorflow_gpu_sources CONFIGURE_DEPENDS tf_ops/gpu/*.cc)
add_library(dad_tensorflow_gpu SHARED ${tensorflow_gpu_sources})
target_link_libraries(dad_tensorflow_gpu PRIVATE dad_tensorflow dad_core ${tensorflow_framework})
dad_target(dad_tensorflow_gpu)
target_include_directories(dad_tensorflow_gpu PRIVATE ${PROJECT_SOURCE_DIR})
target_include_directories(dad_tensorflow_gpu SYSTEM PRIVATE ${tensorflow_include})
target_compile_options(dad_tensorflow_gpu PRIVATE ${tensorflow_definitions})
