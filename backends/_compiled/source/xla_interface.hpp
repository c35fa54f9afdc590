// The part of XLA's foreign function interface, version 0.1 and later, that the kernels use. Only the layout is
// declared; the tests compare it with the header that JAX installs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xla {

struct Error;  // opaque, as is Context
struct Context;

// Most structs begin with their size and a list of extensions, which is empty unless XLA requests something.
struct Extension {
    std::size_t size;
    int type;
    Extension *next;
};

struct Version {
    std::size_t size;
    Extension *extensions;
    int major, minor;
};

struct Metadata {
    std::size_t size;
    Version version;
    std::uint32_t traits;
    std::int64_t state_type;
};

// XLA requests metadata before the first call.
struct MetadataWanted {
    static constexpr int TYPE = 1;
    Extension base;
    Metadata *metadata;
};

enum DataType : int { BOOL = 1, INT32 = 4, INT64 = 5, FLOAT32 = 11, FLOAT64 = 12 };

struct Buffer {
    std::size_t size;
    Extension *extensions;
    DataType dtype;
    void *data;
    std::int64_t axes;
    std::int64_t *sizes;
};

struct Buffers {
    std::size_t size;
    Extension *extensions;
    std::int64_t count;
    int *types;
    void **at;
};

struct Text {
    const char *at;
    std::size_t length;
};

// An attribute with several numbers.
struct Numbers {
    static constexpr int TYPE = 1;
    DataType dtype;
    std::size_t count;
    void *data;
};

struct Attributes {
    std::size_t size;
    Extension *extensions;
    std::int64_t count;
    int *types;
    Text **names;
    void **values;
};

struct Offers;

struct Frame {
    std::size_t size;
    Extension *extensions;
    const Offers *offers;
    Context *context;
    int stage;
    Buffers arguments, results;
    Attributes attributes;
};

using Handler = Error *(Frame *);

struct NewError {
    static constexpr int INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8;
    std::size_t size;
    Extension *extensions;
    const char *message;
    int code;
};

struct OldError {
    std::size_t size;
    Extension *extensions;
    Error *error;
};

struct PoolTask {
    std::size_t size;
    Extension *extensions;
    Context *context;
    void (*run)(void *);
    void *of;
};

struct Threads {
    std::size_t size;
    Extension *extensions;
    Context *context;
    std::int64_t *count;
};

// The functions that XLA offers, by their place in a table; some places are not used here.
struct Offers {
    std::size_t size;
    Extension *extensions;
    Version version;
    const void *own;
    Error *(*make_error)(NewError *);
    void *error_message;
    void (*destroy_error)(OldError *);
    void *others[8];
    Error *(*schedule)(PoolTask *);
    Error *(*count_threads)(Threads *);
};

}  // namespace xla
