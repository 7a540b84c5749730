# dad_crypto: SHA-256 from OpenSSL's static library, of which the linker takes 16 KB. Its symbols stay
# hidden, so a process may have another libcrypto, for example Python's.
set(OPENSSL_USE_STATIC_LIBS TRUE)
find_package(OpenSSL 3.0 COMPONENTS Crypto)
if(NOT OPENSSL_FOUND)
  message(FATAL_ERROR "OpenSSL 3 with libcrypto.a is not there: apt-get install libssl-dev")
endif()
add_library(dad_crypto INTERFACE)
target_include_directories(dad_crypto SYSTEM INTERFACE ${OPENSSL_INCLUDE_DIR})
target_link_libraries(dad_crypto INTERFACE ${OPENSSL_CRYPTO_LIBRARY})
target_link_options(dad_crypto INTERFACE LINKER:--exclude-libs,libcrypto.a)
