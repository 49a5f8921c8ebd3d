# Cross-compiling the core's codecs for aarch64. Nothing of them needs liburing: only its header.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static;-L;/usr/aarch64-linux-gnu)
set(XXHASH_INCLUDE /usr/include CACHE PATH "")
set(LIBURING_INCLUDE /usr/include CACHE PATH "")
set(LIBURING_ARCHIVE LIBURING_ARCHIVE-NOTFOUND CACHE FILEPATH "")
set(LIBURING "" CACHE FILEPATH "")
