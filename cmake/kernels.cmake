# The GPU kernels (src/kernels/<op>/*.cu): raw pointers and a stream, no other room. Built where nvcc is found; the program runs
# without them on the CPU. Code for sm_90a, and PTX for other GPUs from compute capability 8.0 on of all files but those whose
# kernels are wgmma and bulk copies through and through: kernels/portable stands in for these (docs/kernels/portable.md).
set(PLUMB_HAS_CUDA OFF)
if(NOT PLUMB_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(PLUMB_HAS_CUDA ON)
  elseif(PLUMB_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PLUMB_CUDA=ON, but no nvcc was found: install the CUDA toolkit or set CUDACXX")
  endif()
endif()
message(STATUS "GPU kernels: ${PLUMB_HAS_CUDA}")

if(PLUMB_HAS_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25 does not know it for CUDA 13
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  get_filename_component(PLUMB_SRC ${CMAKE_CURRENT_LIST_DIR}/../src ABSOLUTE)
  file(GLOB kernel_sources CONFIGURE_DEPENDS ${PLUMB_SRC}/kernels/*.cu ${PLUMB_SRC}/kernels/*/*.cu)
  add_library(plumb_kernels STATIC ${kernel_sources})
  target_include_directories(plumb_kernels PUBLIC ${PLUMB_SRC} ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_definitions(plumb_kernels PUBLIC PLUMB_HAS_CUDA=1)
  target_compile_options(plumb_kernels PRIVATE -O3 --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-Wextra)
  # Kernels whose registers are planned to the last one: a spill is an error. (Not by -Xptxas=--warning-as-error: what is handed to
  # ptxas is kept beside the PTX, and the driver would refuse spills of any other GPU.)
  file(GLOB hot_sources CONFIGURE_DEPENDS
       ${PLUMB_SRC}/kernels/compressor/*.cu ${PLUMB_SRC}/kernels/hyper_connections/*.cu ${PLUMB_SRC}/kernels/indexer/*.cu
       ${PLUMB_SRC}/kernels/norm/*.cu ${PLUMB_SRC}/kernels/rotary/*.cu ${PLUMB_SRC}/kernels/sparse_attention/*.cu)
  set_source_files_properties(${hot_sources} PROPERTIES COMPILE_OPTIONS "-Xptxas=--warn-on-spills;-Werror=all-warnings")
  set(hopper_sources
      ${PLUMB_SRC}/kernels/grouped_linear/wide.cu ${PLUMB_SRC}/kernels/grouped_linear/narrow.cu
      ${PLUMB_SRC}/kernels/grouped_linear/slab.cu ${PLUMB_SRC}/kernels/grouped_linear/backward_input.cu
      ${PLUMB_SRC}/kernels/sparse_attention/forward.cu ${PLUMB_SRC}/kernels/sparse_attention/pairs.cu
      ${PLUMB_SRC}/kernels/sparse_attention/clusters_of_eight.cu
      ${PLUMB_SRC}/kernels/indexer/scores_bf16.cu ${PLUMB_SRC}/kernels/indexer/scores_record.cu)
  set(portable_sources ${kernel_sources})
  list(REMOVE_ITEM portable_sources ${hopper_sources})
  set_property(SOURCE ${portable_sources} APPEND PROPERTY COMPILE_OPTIONS "-gencode=arch=compute_80,code=compute_80")
endif()
