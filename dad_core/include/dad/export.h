// DAD_EXPORT marks what libdad_core shows to other libraries: the public interface, and the few
// internals that transport plug-ins build on. Everything else is hidden.
#pragma once

#define DAD_EXPORT __attribute__((visibility("default")))
