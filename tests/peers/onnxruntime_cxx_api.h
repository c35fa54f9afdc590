// The declarations of onnxruntime's C++ interface that docs/tutorials/t5.md uses, to parse it without the package.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

enum { OrtDeviceAllocator, OrtMemTypeCPU };
struct OrtAllocator {};

namespace Ort {
using Text = std::unique_ptr<char[]>;
struct MemoryInfo {
    static MemoryInfo CreateCpu(int, int);
};
struct TensorTypeAndShapeInfo {
    std::vector<int64_t> GetShape() const;
    size_t GetElementCount() const;
};
struct TypeInfo {
    TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
};
struct Value {
    Value(Value &&);
    Value &operator=(Value &&);
    template <class T> static Value CreateTensor(const MemoryInfo &, T *, size_t, const int64_t *, size_t);
    template <class T> static Value CreateTensor(OrtAllocator *, const int64_t *, size_t);
    template <class T> const T *GetTensorData() const;
    TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const;
};
struct AllocatorWithDefaultOptions {
    operator OrtAllocator *() const;
};
struct Env {
    Env();
};
struct SessionOptions {
    SessionOptions &RegisterCustomOpsLibrary(const char *);
};
struct RunOptions {};
struct Session;
struct IoBinding {
    explicit IoBinding(Session &);
    void BindInput(const char *, const Value &);
    void BindOutput(const char *, const MemoryInfo &);
    std::vector<Value> GetOutputValues() const;
};
struct Session {
    Session(Env &, const char *, const SessionOptions &);
    size_t GetInputCount() const;
    size_t GetOutputCount() const;
    Text GetInputNameAllocated(size_t, OrtAllocator *) const;
    Text GetOutputNameAllocated(size_t, OrtAllocator *) const;
    TypeInfo GetInputTypeInfo(size_t) const;
    void Run(const RunOptions &, const IoBinding &);
};
} // namespace Ort
