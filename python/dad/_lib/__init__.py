"""The built libraries of dad, and build_info.json, which says what was built."""
