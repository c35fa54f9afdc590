// The module `_kernels`: calls of Python, and the choice between what was compiled for this processor.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "parts.hpp"
#include "xla.hpp"

#define DECLARE_FOR(REAL)                                             \
    bool attend(const ProblemOf<REAL> &, std::int64_t, std::int64_t); \
    bool pull_back(const ProblemOf<REAL> &, std::int64_t, std::int64_t);
#define DECLARE(LEVEL)  \
    namespace LEVEL {   \
    DECLARE_FOR(float)  \
    DECLARE_FOR(double) \
    }
DECLARE(base)
#if defined(LEVELS_OF_X86_64)
DECLARE(v3)
DECLARE(v4)
#endif

namespace {

// The kernels of both passes, for one dtype.
template <class Real>
struct Passes {
    Kernel<Real> attend, pull_back;
};

// What was compiled, the least first, and whether this processor can do it.
struct Level {
    const char *name;
    Passes<float> singles;
    Passes<double> doubles;
    bool here = true;

    const Passes<float> &of(float) const { return singles; }
    const Passes<double> &of(double) const { return doubles; }
};

#define PASSES(LEVEL) \
    {LEVEL::attend, LEVEL::pull_back}, { LEVEL::attend, LEVEL::pull_back }
Level levels[] = {
    {"base", PASSES(base)},
#if defined(LEVELS_OF_X86_64)
    {"x86-64-v3", PASSES(v3)},
    {"x86-64-v4", PASSES(v4)},
#endif
};

void look_at_processor() {
#if defined(LEVELS_OF_X86_64)
    __builtin_cpu_init();  // nothing says that the compiler's own start has come before
    levels[1].here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    levels[2].here = levels[1].here && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
}

const Level *chosen = nullptr;

// use(name): work with what was compiled for a kind of processors; tests do so.
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
    return PyErr_Format(PyExc_ValueError, "%R is not compiled, or not for this processor", name);
}

// What a buffer says of the types that the kernels know.
constexpr Py_UCS4 format(float) { return 'f'; }
constexpr Py_UCS4 format(double) { return 'd'; }
constexpr Py_UCS4 format(std::int32_t) { return 'i'; }
constexpr Py_UCS4 format(unsigned char) { return '?'; }

// Arrays of a call, and the buffers of those that were lent.
class Lent {
    Py_buffer buffers[30];
    int count = 0;

public:
    ~Lent() {
        while (count) PyBuffer_Release(&buffers[--count]);
    }

    // What an array says of its type; 0 and an error where it is none.
    static Py_UCS4 format_of(PyObject *from) {
        if (PyTuple_Check(from)) {
            PyObject *own = PyTuple_Size(from) == 5 ? PyTuple_GetItem(from, 3) : nullptr;
            if (!own || !PyUnicode_Check(own) || PyUnicode_GetLength(own) != 1) return refuse(), 0;
            return PyUnicode_ReadChar(own, 0);
        }
        Py_buffer buffer;
        if (PyObject_GetBuffer(from, &buffer, PyBUF_STRIDES | PyBUF_FORMAT)) return 0;
        const Py_UCS4 format = buffer.format ? static_cast<unsigned char>(*buffer.format) : 'B';
        PyBuffer_Release(&buffer);
        return format;
    }

    // Read an array of the axes (items, heads, rows, columns), of which the first ones may be missing.
    template <class T>
    bool read(PyObject *from, Array<T> &to, std::int64_t *column = nullptr) {
        std::int64_t steps[4] = {};
        if (!read(from, {4, true}, to, steps)) return false;
        to.item = steps[0], to.head = steps[1], to.row = steps[2];
        if (column && to) *column = steps[3];
        return true;
    }

    // Read numbers of rows, of the axes (items, heads, rows).
    template <class T>
    bool read_of_rows(PyObject *from, Array<T> &to) {
        std::int64_t steps[3] = {};
        if (!read(from, {3, false}, to, steps)) return false;
        to.item = steps[0], to.head = steps[1], to.row = steps[2];
        return true;
    }

    // Read numbers of a table's rows, of the axes (sums, heads, rows).
    template <class T>
    bool read_bias(PyObject *from, Array<T> &to) {
        std::int64_t steps[3] = {};
        if (!read(from, {3, true}, to, steps)) return false;
        to.item = steps[0], to.head = steps[1];
        return true;
    }

private:
    struct Axes {
        int count;
        bool rows;  // whether the last one is to be in one piece
    };

    // Read None, an object with a buffer, or (address, sizes, steps, format, what keeps it); put the steps last.
    template <class T>
    bool read(PyObject *from, Axes axes, Array<T> &to, std::int64_t *steps) {
        const void *at = nullptr;
        constexpr Py_UCS4 wanted = format(std::remove_const_t<T>());
        if (from != Py_None && !(PyTuple_Check(from) ? read_tuple(from, axes, wanted, &at, steps)
                                                     : read_buffer(from, axes, wanted, sizeof(T), &at, steps)))
            return false;
        to.at = static_cast<T *>(const_cast<void *>(at));
        return true;
    }

    bool read_buffer(PyObject *from, Axes axes, Py_UCS4 wanted, std::int64_t size, const void **at,
                     std::int64_t *steps) {
        Py_buffer &buffer = buffers[count];
        if (PyObject_GetBuffer(from, &buffer, PyBUF_STRIDES | PyBUF_FORMAT)) return false;
        count++;
        if (!buffer.format || static_cast<unsigned char>(*buffer.format) != wanted || buffer.itemsize != size)
            return refuse();
        *at = buffer.buf;
        return read_steps(axes, buffer.ndim, steps, [&](int i, std::int64_t &length, std::int64_t &step) {
            length = buffer.shape[i], step = buffer.strides[i] / size;
        });
    }

    static bool read_tuple(PyObject *from, Axes axes, Py_UCS4 wanted, const void **at, std::int64_t *steps) {
        if (PyTuple_Size(from) != 5 || format_of(from) != wanted) return refuse();
        PyObject *lengths = PyTuple_GetItem(from, 1), *given = PyTuple_GetItem(from, 2);
        if (!PyTuple_Check(lengths) || !PyTuple_Check(given) || PyTuple_Size(given) != PyTuple_Size(lengths))
            return refuse();
        *at = PyLong_AsVoidPtr(PyTuple_GetItem(from, 0));
        const int here = static_cast<int>(PyTuple_Size(given));
        return read_steps(axes, here, steps, [&](int i, std::int64_t &length, std::int64_t &step) {
            length = PyLong_AsLongLong(PyTuple_GetItem(lengths, i));
            step = PyLong_AsLongLong(PyTuple_GetItem(given, i));
        });
    }

    // Put the steps of the axes that are there last; 0 for an axis of one, which may stand for many.
    template <class Read>
    static bool read_steps(Axes axes, int here, std::int64_t *steps, Read read) {
        if (here < 1 || here > axes.count) return refuse();
        std::int64_t length = 0, step = 0;
        for (int i = 0; i < here; i++) {
            read(i, length, step);
            steps[axes.count - here + i] = length == 1 ? 0 : step;
        }
        if (PyErr_Occurred()) return false;
        if (!axes.rows || length == 1 || step == 1) return true;
        PyErr_SetString(PyExc_BufferError, "an array has rows in pieces");
        return false;
    }

    static bool refuse() {
        PyErr_SetString(PyExc_TypeError, "an array has too many axes, or another type");
        return false;
    }
};

template <class Real>
bool read_numbers(PyObject *const *from, ProblemOf<Real> &x) {
    std::int64_t *whole[] = {&x.items,       &x.heads,  &x.key_heads, &x.queries,  &x.width,  &x.rel_width,
                             &x.value_width, &x.rows,   &x.left,      &x.clip,     &x.before, &x.after,
                             &x.block,       &x.behind, &x.mask_adds, &x.threshold};
    Real *real[] = {&x.scale, &x.rel_scale, &x.softcap, &x.kept};
    constexpr int wholes = sizeof(whole) / sizeof(*whole), reals = sizeof(real) / sizeof(*real);
    PyObject *const numbers = from[2];
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != wholes + reals) {
        PyErr_SetString(PyExc_TypeError, "a call has another number of numbers");
        return false;
    }
    x.keys = PyLong_AsLongLong(from[0]), x.offset = PyLong_AsLongLong(from[1]);
    for (int i = 0; i < wholes; i++) *whole[i] = PyLong_AsLongLong(PyTuple_GetItem(numbers, i));
    for (int i = 0; i < reals; i++)
        *real[i] = static_cast<Real>(PyFloat_AsDouble(PyTuple_GetItem(numbers, wholes + i)));
    return !PyErr_Occurred();
}

// Work on the parts `first … stop - 1` of a call without the interpreter's lock: on a team of so many threads, if any.
template <class Real>
PyObject *work(Kernel<Real> kernel, const ProblemOf<Real> &x, PyObject *const *args) {
    const std::int64_t first = PyLong_AsLongLong(args[0]), stop = PyLong_AsLongLong(args[1]);
    const std::int64_t all = PyLong_AsLongLong(args[2]), threads = PyLong_AsLongLong(args[4]);
    const auto team = reinterpret_cast<Team>(PyLong_AsVoidPtr(args[3]));
    if (PyErr_Occurred()) return nullptr;
    Parts<Real> parts(kernel, x, first, stop, all);
    PyThreadState *state = PyEval_SaveThread();
    const bool done = parts.run(team, static_cast<unsigned>(threads));
    PyEval_RestoreThread(state);
    return done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

// What both passes are given: keys, offset, numbers, q, k, v, rel_k, rel_v, rel_bias, rel_q, mask, key_table,
// q_segments, k_segments, q_positions, k_positions, query_hashes, key_hashes.
constexpr int GIVEN = 18;

template <class Real>
bool read_given(Lent &lent, PyObject *const *args, ProblemOf<Real> &x) {
    if (!read_numbers(args, x)) return false;
    args += 3;
    return lent.read(args[0], x.q) && lent.read(args[1], x.k) && lent.read(args[2], x.v) &&
           lent.read(args[3], x.rel_k) && lent.read(args[4], x.rel_v) && lent.read_bias(args[5], x.bias) &&
           lent.read(args[6], x.rel_q) &&
           (x.mask_adds ? lent.read(args[7], x.added, &x.mask_key) : lent.read(args[7], x.seen, &x.mask_key)) &&
           lent.read(args[8], x.key_table) && lent.read(args[9], x.q_segments) && lent.read(args[10], x.k_segments) &&
           lent.read(args[11], x.q_positions) && lent.read(args[12], x.k_positions) &&
           lent.read(args[13], x.query_hashes) && lent.read(args[14], x.key_hashes);
}

bool check_count(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted) PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, got %zd", wanted, count);
    return count == wanted;
}

// attend(…, out, lse, first, stop, parts, team, threads)
template <class Real>
PyObject *attend_of(PyObject *const *args) {
    ProblemOf<Real> x{};
    Lent lent;
    if (!read_given(lent, args, x)) return nullptr;
    args += GIVEN;
    if (!lent.read(args[0], x.out) || !lent.read_of_rows(args[1], x.lse)) return nullptr;
    return work(chosen->of(Real()).attend, x, args + 2);
}

// pull_back(…, d_out, out, lse, d_lse, d_q, d_k, d_v, d_rel_k, d_rel_v, d_rel_bias, d_rel_q, d_key_table, sums, first,
// stop, parts, team, threads)
template <class Real>
PyObject *pull_back_of(PyObject *const *args) {
    ProblemOf<Real> x{};
    Lent lent;
    if (!read_given(lent, args, x)) return nullptr;
    args += GIVEN;
    if (!lent.read(args[0], x.d_out) || !lent.read(args[1], x.out) || !lent.read_of_rows(args[2], x.lse) ||
        !lent.read_of_rows(args[3], x.d_lse) || !lent.read(args[4], x.d_q) || !lent.read(args[5], x.d_k) ||
        !lent.read(args[6], x.d_v) || !lent.read(args[7], x.d_rel_k) || !lent.read(args[8], x.d_rel_v) ||
        !lent.read_bias(args[9], x.d_bias) || !lent.read(args[10], x.d_rel_q) || !lent.read(args[11], x.d_key_table))
        return nullptr;
    x.sums = PyLong_AsLongLong(args[12]);
    return work(chosen->of(Real()).pull_back, x, args + 13);
}

// A call's dtype is that of its queries.
template <Py_ssize_t COUNT, PyObject *(*of_floats)(PyObject *const *), PyObject *(*of_doubles)(PyObject *const *)>
PyObject *by_dtype(PyObject *, PyObject *const *args, Py_ssize_t count) {
    if (!check_count(count, COUNT)) return nullptr;
    const Py_UCS4 format = Lent::format_of(args[3]);
    return !format ? nullptr : format == 'd' ? of_doubles(args) : of_floats(args);
}

constexpr auto attend = by_dtype<GIVEN + 7, attend_of<float>, attend_of<double>>;
constexpr auto pull_back = by_dtype<GIVEN + 18, pull_back_of<float>, pull_back_of<double>>;

PyMethodDef methods[] = {
    {"attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attend)), METH_FASTCALL, nullptr},
    {"pull_back", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pull_back)), METH_FASTCALL, nullptr},
    {"use", use, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// What XLA calls, by the addresses that XLA_ATTEND and XLA_PULL_BACK hold.
XLA_FFI_Error *xla_attend(XLA_FFI_CallFrame *frame) {
    if (xla::tell_version(frame)) return nullptr;
    return xla::of_doubles(frame) ? xla::attend(chosen->doubles.attend, frame)
                                  : xla::attend(chosen->singles.attend, frame);
}

XLA_FFI_Error *xla_pull_back(XLA_FFI_CallFrame *frame) {
    if (xla::tell_version(frame)) return nullptr;
    return xla::of_doubles(frame) ? xla::pull_back(chosen->doubles.pull_back, frame)
                                  : xla::pull_back(chosen->singles.pull_back, frame);
}

bool add_address(PyObject *module, const char *name, XLA_FFI_Handler *handler) {
    PyObject *capsule = PyCapsule_New(reinterpret_cast<void *>(handler), nullptr, nullptr);
    const bool done = capsule && !PyModule_AddObjectRef(module, name, capsule);
    Py_XDECREF(capsule);
    return done;
}

// LEVELS: what this processor can do, the best last.
int start(PyObject *module) {
    look_at_processor();
    PyObject *names = PyList_New(0);
    if (!names) return -1;
    for (const Level &level : levels) {
        if (!level.here) continue;
        chosen = &level;
        PyObject *name = PyUnicode_FromString(level.name);
        const int failed = name ? PyList_Append(names, name) : -1;
        Py_XDECREF(name);
        if (failed) break;
    }
    if (PyErr_Occurred() || PyModule_AddObjectRef(module, "LEVELS", names)) {
        Py_DECREF(names);
        return -1;
    }
    Py_DECREF(names);
    return add_address(module, "XLA_ATTEND", xla_attend) && add_address(module, "XLA_PULL_BACK", xla_pull_back) ? 0
                                                                                                                : -1;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(start)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModuleDef_Init(&definition); }
