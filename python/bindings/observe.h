// What dad._lib._core has for people who look at a running job.
#pragma once

#include <pybind11/pybind11.h>

namespace dad_bindings {

void AddObservers(pybind11::module_& m);

}  // namespace dad_bindings
