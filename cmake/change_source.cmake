# change_source(PREFIX FILE OLD NEW): replaces OLD by NEW in the variable PREFIX_FILE, which holds the text of a file of a library
# that is built from a changed copy. Such files are pinned by their hash, so a place that is not found is an error.
function(change_source prefix file old new)
  string(FIND "${${prefix}_${file}}" "${old}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "${prefix}'s ${file} has no '${old}' to change; it is another version than cmake/${prefix}.cmake knows")
  endif()
  string(REPLACE "${old}" "${new}" changed "${${prefix}_${file}}")
  set(${prefix}_${file} "${changed}" PARENT_SCOPE)
endfunction()
