// The C interface of libdad_gloo.so.
#include <gloo/config.h>

#include <exception>

#include "transport/plugin_abi.h"
#include "transport/registry.h"
#include "transport/tcp/tcp_transport.h"

#define DAD_EXPORT extern "C" __attribute__((visibility("default")))

DAD_EXPORT const char* dad_plugin_abi() {
  static const std::string abi = dad::MakePluginAbi();
  return abi.c_str();
}

DAD_EXPORT const char* dad_plugin_describe() {
  static const std::string text = "TCP, connected by gloo " + std::to_string(GLOO_VERSION_MAJOR) +
                                  "." + std::to_string(GLOO_VERSION_MINOR);
  return text.c_str();
}

DAD_EXPORT dad::Transport* dad_plugin_connect(const dad::PluginArgs* args, char* error,
                                              size_t error_size) {
  try {
    auto transport = dad::tcp::TcpTransport::Connect(*args->world, *args->options);
    if (transport.ok()) return std::move(transport).value().release();
    dad::WritePluginError(transport.status(), error, error_size);
  } catch (const std::exception& failure) {
    dad::WritePluginError(dad::Status::Internal(failure.what()), error, error_size);
  }
  return nullptr;
}
