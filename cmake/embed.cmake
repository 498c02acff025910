# plumb_embed(TARGET FILES...): makes files part of a program. They become byte arrays in <build>/embedded/<TARGET>.cpp, found
# by name through embedded_file() (serve/embedded.h). As a script (cmake -DOUTPUT=... -DFILES=... -P embed.cmake) it writes that
# source.
if(CMAKE_SCRIPT_MODE_FILE)
  set(arrays "")
  set(table "")
  set(index 0)
  foreach(file ${FILES})
    get_filename_component(name ${file} NAME)
    file(READ ${file} bytes HEX)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
    string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
    string(APPEND arrays "const unsigned char file_${index}[] = {\n${bytes}\n};\n")
    string(APPEND table "  if (name == \"${name}\") return {reinterpret_cast<const char*>(file_${index}), sizeof file_${index}};\n")
    math(EXPR index "${index} + 1")
  endforeach()
  file(WRITE ${OUTPUT} "#include \"serve/embedded.h\"

namespace {
${arrays}}  // namespace

std::string_view plumb::serve::embedded_file([[maybe_unused]] std::string_view name) {
${table}  return {};
}
")
  return()
endif()

set(PLUMB_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_FILE})
function(plumb_embed target)
  set(output ${CMAKE_BINARY_DIR}/embedded/${target}.cpp)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} "-DFILES=${ARGN}" -P ${PLUMB_EMBED_SCRIPT}
    DEPENDS ${ARGN} ${PLUMB_EMBED_SCRIPT}
    COMMENT "Embedding files of ${target}"
    VERBATIM)
  target_sources(${target} PRIVATE ${output})
endfunction()
