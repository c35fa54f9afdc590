// The Python module `_kernels`: it reads the arguments of calls and chooses the kernels compiled for this processor.
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_GIL_DISABLED)  // a Python without the GIL has no limited API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "levels.hpp"
#include "xla.hpp"

namespace {

std::atomic<const Level *> chosen{nullptr};  // calls of other threads may read it while tests change it

// The kernels of the chosen level for one dtype.
template <class Stored>
const Passes<Stored> &passes() {
    return chosen.load()->of<Stored>();
}

// use(name): select the kernels of a kind of processor. Only tests call it.
PyObject *use(PyObject *, PyObject *name) {
    for (const Level &level : levels) {
        PyObject *own = PyUnicode_FromString(level.name);
        const int same = own ? PyObject_RichCompareBool(own, name, Py_EQ) : -1;
        Py_XDECREF(own);
        if (same < 0) return nullptr;
        if (!same || !level.here) continue;
        chosen = &level;
        Py_RETURN_NONE;
    }
    return PyErr_Format(PyExc_ValueError, "%R must be a level that is compiled and that this processor supports", name);
}

// A number type as buffers and DLPack encode it; buffers have no code for bfloat16.
struct Type {
    char format;
    std::uint8_t code;
    Index size;
};

template <class T>
constexpr Type TYPE = std::is_same_v<T, float>          ? Type{'f', 2, sizeof(T)}
                      : std::is_same_v<T, double>       ? Type{'d', 2, sizeof(T)}
                      : std::is_same_v<T, Float16>      ? Type{'e', 2, sizeof(T)}
                      : std::is_same_v<T, BFloat16>     ? Type{'\0', 4, sizeof(T)}
                      : std::is_same_v<T, std::int32_t> ? Type{'i', 0, sizeof(T)}
                                                        : Type{'?', 6, sizeof(T)};
constexpr Type INTEGERS{'i', 0, 0};  // of 4 or 8 bytes

// The fields of a DLPack capsule that are read here.
struct Exchanged {
    void *data;
    std::int32_t device, device_number, axes;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *sizes, *steps;
    std::uint64_t offset;
};
constexpr std::int32_t CPU = 1;

// Reads the arguments of a call in the order of their declaration, and holds their buffers.
class PythonArguments {
    static constexpr int MOST = 40;
    Py_buffer buffers_[MOST];
    int count_ = 0;
    PyObject *const *next_;
    PyObject *opened_ = nullptr;  // the first array, whose buffer is open already

public:
    explicit PythonArguments(PyObject *const *args) : next_(args) {}
    PythonArguments(const PythonArguments &) = delete;
    ~PythonArguments() {
        while (count_) PyBuffer_Release(&buffers_[--count_]);
    }

    // The type of the first array. An object that is no array is rejected when it is read.
    Type type_of(PyObject *from) {
        if (PyCapsule_CheckExact(from)) {
            const auto *own = static_cast<const Exchanged *>(PyCapsule_GetPointer(from, "dltensor"));
            PyErr_Clear();
            return own ? Type{0, own->code, own->bits / 8} : Type{};
        }
        if (PyObject_GetBuffer(from, buffers_, PyBUF_STRIDES | PyBUF_FORMAT)) return PyErr_Clear(), Type{};
        opened_ = from, count_ = 1;
        const char *format = buffers_->format ? buffers_->format : "B";
        return {format[*format == '='], 0, buffers_->itemsize};
    }

    PyObject *next() { return *next_++; }
    Index whole() { return PyLong_AsLongLong(next()); }

    // Read None, an object with a buffer, or a DLPack capsule.
    template <class Given>
    bool operator()(const char *name, Given &to, Need need, const Axes &axes) {
        PyObject *from = next();
        if (from == Py_None) return need != Need::MUST || refuse(name, "is missing");
        if (need == Need::NOT) return refuse(name, "must be None in this call");
        constexpr bool is_open = std::is_same_v<Given, Integers>;  // whether its type is
        using T = std::remove_pointer_t<decltype(to.at)>;
        const Type type = is_open ? INTEGERS : TYPE<std::remove_const_t<T>>;
        View view{};
        if (!(PyCapsule_CheckExact(from) ? read_exchanged(name, from, type, view)
                                         : read_buffer(name, from, type, !std::is_const_v<T>, view)))
            return false;
        if (const char *fault = place(view, axes, to)) return refuse(name, fault);
        if constexpr (is_open) to.wide = view.bytes == sizeof(std::int64_t);
        const Index alignment = is_open ? view.bytes : alignof(T);
        if (reinterpret_cast<std::uintptr_t>(view.at) % alignment) return copy(name, "is not aligned to its type");
        const int last = view.count - 1;
        const bool in_rows = axes.column.kind == Axis::NONE || view.sizes[last] < 2 || view.steps[last] == 1 || !to.at;
        return in_rows || copy(name, "is not contiguous along its last axis");
    }

private:
    static bool refuse(const char *name, const char *why) {
        PyErr_Format(PyExc_TypeError, "%s %s", name, why);
        return false;
    }

    // Raise a BufferError: a copy of the array would work.
    static bool copy(const char *name, const char *why) {
        PyErr_Format(PyExc_BufferError, "%s %s", name, why);
        return false;
    }

    bool read_buffer(const char *name, PyObject *from, Type type, bool writes, View &view) {
        const bool is_open = from == opened_ && !writes;
        Py_buffer &buffer = buffers_[is_open ? 0 : count_];
        if (!is_open && count_ == MOST) return refuse(name, "exceeds the number of arrays that a call can have");
        if (!is_open &&
            PyObject_GetBuffer(from, &buffer, PyBUF_STRIDES | PyBUF_FORMAT | (writes ? PyBUF_WRITABLE : 0))) {
            if (!writes) return false;
            PyErr_Clear();
            return refuse(name, "is not writable");
        }
        count_ += !is_open;
        const char *format = buffer.format ? buffer.format : "B";
        if (*format == '=') format++;  // native byte order, without alignment
        const char own = *format;
        const bool same = own == type.format || (type.format == 'i' && (own == 'l' || (!type.size && own == 'q')));
        if (!same || format[1] || !fits(buffer.itemsize, type)) return refuse(name, "has the wrong type");
        if (buffer.ndim > 4) return refuse(name, "has too many axes");
        view.at = buffer.buf, view.count = buffer.ndim, view.bytes = buffer.itemsize;
        for (int i = 0; i < view.count; i++) {
            view.sizes[i] = buffer.shape[i], view.steps[i] = buffer.strides[i] / view.bytes;
            if (buffer.strides[i] % view.bytes && view.sizes[i] > 1)
                return copy(name, "has strides that are not multiples of its item size");
        }
        return true;
    }

    static bool read_exchanged(const char *name, PyObject *from, Type type, View &view) {
        const auto *own = static_cast<const Exchanged *>(PyCapsule_GetPointer(from, "dltensor"));
        if (!own) return PyErr_Clear(), refuse(name, "is not an array");
        if (own->code != type.code || own->bits % 8 || !fits(own->bits / 8, type) || own->lanes != 1)
            return refuse(name, "has the wrong type");
        if (own->device != CPU) return refuse(name, "is not in the CPU's memory");
        if (own->axes > 4) return refuse(name, "has too many axes");
        if (!own->data && !is_empty(*own)) return copy(name, "has no memory");
        view.at = own->data ? static_cast<char *>(own->data) + own->offset : nullptr, view.count = own->axes;
        view.bytes = own->bits / 8;
        for (Index i = view.count - 1, step = 1; i >= 0; step *= own->sizes[i--])
            view.sizes[i] = own->sizes[i], view.steps[i] = own->steps ? own->steps[i] : step;
        return true;
    }

    static bool fits(Index bytes, Type type) { return type.size ? bytes == type.size : bytes == 4 || bytes == 8; }

    static bool is_empty(const Exchanged &x) { return std::find(x.sizes, x.sizes + x.axes, 0) != x.sizes + x.axes; }
};

// The names of the values of one kind, as a list.
struct Names {
    PyObject *list = PyList_New(0);

    ~Names() { Py_XDECREF(list); }

    void add(const char *name) {
        PyObject *own = list ? PyUnicode_FromString(name) : nullptr;
        if (own) PyList_Append(list, own);
        Py_XDECREF(own);
    }

    template <class T>
    bool operator()(const char *name, Array<T> &, Need, const Axes &) {
        return add(name), true;
    }

    bool put(PyObject *module, const char *name) const {
        PyObject *found = list && !PyErr_Occurred() ? PyList_AsTuple(list) : nullptr;
        const bool done = found && !PyModule_AddObjectRef(module, name, found);
        Py_XDECREF(found);
        return done;
    }
};

// Read keys and offset, a tuple of the other numbers, the arrays, and the integers.
template <class Stored>
bool read_call(PythonArguments &from, ProblemOf<Stored> &x) {
    x.keys = from.whole(), x.offset = from.whole();
    PyObject *numbers = from.next();
    if (!PyTuple_Check(numbers)) return PyErr_SetString(PyExc_TypeError, "numbers must be a tuple"), false;
    const Py_ssize_t count = PyTuple_Size(numbers);
    Py_ssize_t at = -2;
    x.numbers([&](const char *, auto &number) {
        PyObject *own = 0 <= at && at < count ? PyTuple_GetItem(numbers, at) : nullptr;
        if constexpr (std::is_same_v<decltype(number), Index &>) {
            if (own) number = PyLong_AsLongLong(own);
        } else {
            if (own) number = static_cast<typename ProblemOf<Stored>::Real>(PyFloat_AsDouble(own));
        }
        at++;
    });
    if (PyErr_Occurred()) return false;
    if (at != count) return PyErr_Format(PyExc_TypeError, "expected %zd numbers, got %zd", at, count), false;
    if (x.is_too_large()) return PyErr_NoMemory(), false;
    return x.arrays(from) && x.integers(from);
}

// Derive what the kernels need; false if something is wrong.
template <class Stored>
bool prepared(ProblemOf<Stored> &x, OwnIntegers &own) {
    const char *wrong = prepare(x, own);
    if (wrong == NO_MEMORY) PyErr_NoMemory();
    if (wrong && wrong != NO_MEMORY) PyErr_Format(PyExc_TypeError, "%s", wrong);
    return !wrong;
}

// Return the number of pairs of queries and keys in each task of a head.
PyObject *cut(const Tasks &tasks) {
    PyObject *found = PyTuple_New(tasks.of_a_head());
    for (Index i = 0; found && i < tasks.of_a_head(); i++) {
        PyObject *pairs = PyLong_FromLongLong(tasks.pairs(tasks.task(i)));
        if (!pairs || PyTuple_SetItem(found, i, pairs)) return Py_DECREF(found), nullptr;
    }
    return found;
}

// Run a call without the interpreter's lock, which is taken from time to time to check for an interrupt.
template <class Stored>
PyObject *work(Kernel<Stored> kernel, ProblemOf<Stored> &x, Grain grain, PythonArguments &from) {
    const auto team = reinterpret_cast<Team>(PyLong_AsVoidPtr(from.next()));
    const Index threads = from.whole();
    if (PyErr_Occurred()) return nullptr;
    if (threads < 0) return PyErr_Format(PyExc_TypeError, "threads must not be negative");
    x.narrow();
    Tasks tasks(x, static_cast<bool>(x.k_positions), grain);
    if (!tasks.make()) return PyErr_NoMemory();
    if (!threads) return cut(tasks);
    PyThreadState *state = PyEval_SaveThread();
    const auto go_on = [](void *of) {
        PyThreadState *&own = *static_cast<PyThreadState **>(of);
        PyEval_RestoreThread(own);
        const bool interrupted = PyErr_CheckSignals() != 0;
        own = PyEval_SaveThread();
        return !interrupted;
    };
    tasks.ask(go_on, &state);
    const auto on_threads = [team](void (*work)(void *), void *of, Index count) {
        (team ? team : run_on_new_threads)(work, of, static_cast<unsigned>(count), 0);
    };
    const bool done = run_tasks(kernel, x, tasks, on_threads, threads);
    PyEval_RestoreThread(state);
    if (done) Py_RETURN_NONE;
    return PyErr_Occurred() ? nullptr : PyErr_NoMemory();
}

Py_ssize_t forward_count, backward_count;

bool check_count(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
    return count == wanted;
}

// attend(keys, offset, numbers, *ARRAYS, *INTEGERS, *RESULTS, team, threads); with no threads, see `cut`
template <class Stored>
PyObject *attend_of(PythonArguments &from) {
    ProblemOf<Stored> x{};
    OwnIntegers own;
    const bool done = read_call(from, x) && x.results(from) && prepared(x, own);
    return done ? work(passes<Stored>().attend, x, grain_of_attend(x), from) : nullptr;
}

// pull_back(keys, offset, numbers, *ARRAYS, *INTEGERS, *COTANGENTS, *GRADIENTS, team, threads)
template <class Stored>
PyObject *pull_back_of(PythonArguments &from) {
    ProblemOf<Stored> x{};
    OwnIntegers own;
    if (!read_call(from, x) || !x.cotangents(from) || !x.gradients(from) || !prepared(x, own)) return nullptr;
    return work(passes<Stored>().pull_back, x, grain_of_pull_back(x), from);
}

// The dtype of a call is that of the queries, its first array.
template <class Visit>
PyObject *with_type(const Type &type, Visit &&visit) {
    const auto is = [&](const Type &other) {
        return type.size == other.size && (type.format ? type.format == other.format : type.code == other.code);
    };
    if (is(TYPE<double>)) return visit(double());
    if (is(TYPE<Float16>)) return visit(Float16());
    if (is(TYPE<BFloat16>)) return visit(BFloat16());
    return visit(float());
}

PyObject *attend(PyObject *, PyObject *const *args, Py_ssize_t count) {
    if (!check_count(count, forward_count)) return nullptr;
    PythonArguments from(args);
    return with_type(from.type_of(args[3]), [&](auto stored) { return attend_of<decltype(stored)>(from); });
}

PyObject *pull_back(PyObject *, PyObject *const *args, Py_ssize_t count) {
    if (!check_count(count, backward_count)) return nullptr;
    PythonArguments from(args);
    return with_type(from.type_of(args[3]), [&](auto stored) { return pull_back_of<decltype(stored)>(from); });
}

PyMethodDef methods[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL, nullptr},
    {"pull_back", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pull_back)), METH_FASTCALL, nullptr},
    {"use", use, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// The functions that XLA calls, at the addresses XLA_ATTEND and XLA_PULL_BACK.
xla::Error *xla_attend(xla::Frame *frame) {
    if (xla::give_version(frame)) return nullptr;
    return xla::of_doubles(frame) ? xla::attend(passes<double>().attend, frame)
                                  : xla::attend(passes<float>().attend, frame);
}

xla::Error *xla_pull_back(xla::Frame *frame) {
    if (xla::give_version(frame)) return nullptr;
    return xla::of_doubles(frame) ? xla::pull_back(passes<double>().pull_back, frame)
                                  : xla::pull_back(passes<float>().pull_back, frame);
}

bool add_address(PyObject *module, const char *name, xla::Handler *handler) {
    PyObject *capsule = PyCapsule_New(reinterpret_cast<void *>(handler), nullptr, nullptr);
    const bool done = capsule && !PyModule_AddObjectRef(module, name, capsule);
    Py_XDECREF(capsule);
    return done;
}

// Declare the names of the arguments of a call in order: WHOLE and REAL numbers, the first of which are keys and
// offset; ARRAYS, INTEGERS, RESULTS, COTANGENTS and GRADIENTS.
bool declare(PyObject *module) {
    ProblemOf<float> x{};
    Names whole, real, arrays, integers, results, cotangents, gradients;
    x.numbers(
        [&](const char *name, auto &number) { (std::is_same_v<decltype(number), Index &> ? whole : real).add(name); });
    x.arrays(arrays), x.integers(integers), x.results(results), x.cotangents(cotangents), x.gradients(gradients);
    if (PyErr_Occurred()) return false;
    const auto count = [](const auto &...names) { return (PyList_Size(names.list) + ...); };
    forward_count = 3 + count(arrays, integers, results) + 2;
    backward_count = 3 + count(arrays, integers, cotangents, gradients) + 2;
    return whole.put(module, "WHOLE") && real.put(module, "REAL") && arrays.put(module, "ARRAYS") &&
           integers.put(module, "INTEGERS") && results.put(module, "RESULTS") && cotangents.put(module, "COTANGENTS") &&
           gradients.put(module, "GRADIENTS");
}

// LEVELS: the compiled levels that this processor supports, the best last; and PROCESSOR: its best one, compiled or
// not.
int start(PyObject *module) {
    look_at_processor();
    Names names;
    const char *best = nullptr;
    for (const Level &level : levels) {
        if (level.supported) best = level.name;
        if (!level.here) continue;
        chosen = &level;
        names.add(level.name);
    }
    const bool done = names.put(module, "LEVELS") && !PyModule_AddStringConstant(module, "PROCESSOR", best) &&
                      declare(module) && add_address(module, "XLA_ATTEND", xla_attend) &&
                      add_address(module, "XLA_PULL_BACK", xla_pull_back);
    return done ? 0 : -1;
}

// Calls keep nothing: two threads may call at the same time without the GIL.
PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(start)},
#if defined(Py_GIL_DISABLED)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModuleDef_Init(&definition); }
