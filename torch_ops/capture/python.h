#pragma once

#include <pybind11/pybind11.h>

namespace dad_torch {

// Adds the functions capture_* and what they return to the module.
void DefineCapture(pybind11::module_& m);

}  // namespace dad_torch
