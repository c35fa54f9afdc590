// The part of onnxruntime's C interface that is used: indices into its append-only table of functions, and the struct
// that describes an operator, as of version 17 of the interface (release 1.17).
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnx {

struct Status;
struct Operator;
struct Options;
struct Domain;
struct Info;     // of a node, when its kernel is created
struct Context;  // of a node, when it runs
struct Value;
struct Shape;  // and type of a tensor

constexpr std::uint32_t VERSION = 17;  // the first that shares its threads with operators

enum Code : int { FAIL = 1, INVALID_ARGUMENT = 2 };

enum Type : int {
    UNDEFINED = 0,
    FLOAT32 = 1,
    INT8 = 3,
    INT64 = 7,
    BOOL = 9,
    FLOAT16 = 10,
    FLOAT64 = 11,
    BFLOAT16 = 16
};

// The functions that are called, by their indices in the table.
class Functions {
    template <class Function>
    Function *place(std::size_t number) const {
        return reinterpret_cast<Function *const *>(this)[number];
    }

public:
    auto make_status() const { return place<Status *(Code, const char *)>(0); }
    auto make_domain() const { return place<Status *(const char *, Domain **)>(26); }
    auto add_operator() const { return place<Status *(Domain *, const Operator *)>(27); }
    auto add_domain() const { return place<Status *(Options *, Domain *)>(28); }
    auto data() const { return place<Status *(Value *, void **)>(51); }
    auto count_axes() const { return place<Status *(const Shape *, std::size_t *)>(61); }
    auto sizes() const { return place<Status *(const Shape *, std::int64_t *, std::size_t)>(62); }
    auto shape() const { return place<Status *(const Value *, Shape **)>(65); }
    auto real() const { return place<Status *(const Info *, const char *, float *)>(85); }
    auto whole() const { return place<Status *(const Info *, const char *, std::int64_t *)>(86); }
    auto text() const { return place<Status *(const Info *, const char *, char *, std::size_t *)>(87); }
    auto input() const { return place<Status *(const Context *, std::size_t, const Value **)>(90); }
    auto output() const {
        return place<Status *(Context *, std::size_t, const std::int64_t *, std::size_t, Value **)>(91);
    }
    auto free_status() const { return place<void(Status *)>(93); }
    auto free_shape() const { return place<void(Shape *)>(99); }
    auto on_threads() const {
        return place<Status *(const Context *, void (*)(void *, std::size_t), std::size_t, std::size_t, void *)>(274);
    }
};

// The argument of a library's registration function.
struct Base {
    const Functions *(*functions)(std::uint32_t version);  // returns null if the runtime is older
    const char *(*release)();
};

// An operator for one type of numbers. The first argument is the operator, which may be the start of a larger struct.
struct Operator {
    std::uint32_t version;
    void *(*unused_make)(const Operator *, const Functions *, const Info *);
    const char *(*name)(const Operator *);
    const char *(*provider)(const Operator *);
    Type (*input_type)(const Operator *, std::size_t);
    std::size_t (*input_count)(const Operator *);
    Type (*output_type)(const Operator *, std::size_t);
    std::size_t (*output_count)(const Operator *);
    void (*unused_run)(void *, Context *);
    void (*destroy)(void *kernel);
    int (*input_kind)(const Operator *, std::size_t);  // 0: required, 1: optional
    int (*output_kind)(const Operator *, std::size_t);
    int (*input_memory)(const Operator *, std::size_t);  // 0: the memory of the execution provider
    int (*unused_variadic[4])(const Operator *);
    Status *(*make)(const Operator *, const Functions *, const Info *, void **kernel);
    Status *(*run)(void *kernel, Context *);
    Status *(*infer)(const Operator *, void *);
    int (*first_version)(const Operator *);
    int (*last_version)(const Operator *);
};

}  // namespace onnx
