// A node `relskew::RelativeAttention`: its inputs, outputs and attributes.
#pragma once

#include <cmath>
#include <cstring>

#include "host.hpp"
#include "onnx_interface.hpp"

namespace {

using namespace onnx;

// The inputs of a node in order; those from `offset` on are not arrays of a call. A past of keys is followed by that of
// values.
struct Input {
    const char *name;
    relskew_array relskew_call::*at;
    Type type;  // UNDEFINED: the type of the operator
};
constexpr std::size_t Q = 0, V = 2, MASK = 8, ADDED = 9, OFFSET = 15, SPAN_LEFT = 16, SPAN_RIGHT = 17, PAST = 18,
                      PAST_INT8 = 20, PAST_SCALE = 22, TABLES_INT8 = 24, TABLES_SCALE = 26;
constexpr Input INPUTS[] = {
    {"q", &relskew_call::q, UNDEFINED},
    {"k", &relskew_call::k, UNDEFINED},
    {"v", &relskew_call::v, UNDEFINED},
    {"rel_k", &relskew_call::rel_k, UNDEFINED},
    {"rel_v", &relskew_call::rel_v, UNDEFINED},
    {"rel_bias", &relskew_call::rel_bias, UNDEFINED},
    {"rel_q", &relskew_call::rel_q, UNDEFINED},
    {"key_table", &relskew_call::key_table, UNDEFINED},
    {"mask", &relskew_call::mask, BOOL},
    {"added", &relskew_call::mask, UNDEFINED},
    {"sinks", &relskew_call::sinks, UNDEFINED},
    {"q_segments", &relskew_call::q_segments, INT64},
    {"k_segments", &relskew_call::k_segments, INT64},
    {"q_positions", &relskew_call::q_positions, INT64},
    {"k_positions", &relskew_call::k_positions, INT64},
    {"offset", nullptr, INT64},
    {"span_left", nullptr, INT64},
    {"span_right", nullptr, INT64},
    {"past_key", nullptr, UNDEFINED},
    {"past_value", nullptr, UNDEFINED},
    {"past_key_int8", nullptr, INT8},
    {"past_value_int8", nullptr, INT8},
    {"past_key_scale", nullptr, FLOAT32},
    {"past_value_scale", nullptr, FLOAT32},
    {"rel_k_int8", &relskew_call::rel_k, INT8},
    {"rel_v_int8", &relskew_call::rel_v, INT8},
    {"rel_k_scale", &relskew_call::rel_k_scale, FLOAT32},
    {"rel_v_scale", &relskew_call::rel_v_scale, FLOAT32},
};
constexpr std::size_t INPUT_COUNT = sizeof INPUTS / sizeof *INPUTS, OUTPUT_COUNT = 8;
enum : std::size_t { OUT, PRESENT, LSE = 3, PRESENT_INT8, PRESENT_SCALE = PRESENT_INT8 + 2 };

constexpr int INTERFACE = 1;  // of the attributes: nodes with a later version are rejected

struct RelativeAttention : Operator {
    Type type;
    relskew_type own_type;
    Index bytes;
};

// Calls of the runtime; the first failure is kept.
struct Calls {
    const Functions &ort;
    Status *status = nullptr;

    bool operator()(Status *made) {
        if (made && status)
            ort.free_status()(made);
        else if (made)
            status = made;
        return !status;
    }

    bool refuse(const char *why) { return (*this)(ort.make_status()(INVALID_ARGUMENT, why)); }
};

// The attributes of a node.
struct Node {
    const RelativeAttention &of;
    const Functions &ort;
    relskew_call call = relskew_new_call();
    Index heads = 0, kv_heads = 0;  // of arrays (batch, length, heads · width)
    Index lead = -1;                // which row of a longer table is r = 0; -1: tables have no extra rows

    bool by_distance = false;  // whether the bias is one slope per head, multiplied by the distance

    bool read(const Info *info, Calls &calls) {
        if (whole(info, "interface", 1) > INTERFACE)
            return calls.refuse(
                "relskew: the model was written by a later version of relskew: use the library of that version");
        call.type = of.own_type;
        heads = whole(info, "num_heads", 0), kv_heads = whole(info, "kv_num_heads", 0);
        call.left = whole(info, "left", 0), call.right = whole(info, "right", 0);
        by_distance = whole(info, "by_distance", 0) != 0;
        lead = whole(info, "lead", -1), call.causal = whole(info, "causal", 0) != 0;
        call.window_left = whole(info, "window_left", -1), call.window_right = whole(info, "window_right", -1);
        call.block_size = whole(info, "block_size", 0), call.blocks_before = whole(info, "blocks_before", -1);
        call.offset = whole(info, "offset", 0);
        call.scale = real(info, "scale", NAN), call.rel_scale = real(info, "rel_scale", NAN);
        call.softcap = real(info, "softcap", 0);
        char beyond[8] = "error";
        std::size_t length = sizeof beyond;
        is_there(ort.text()(info, "beyond", beyond, &length));
        const char *const all[] = {"error", "clip", "zero"};
        for (call.beyond = 0; call.beyond < 3; call.beyond++)
            if (!std::strcmp(beyond, all[call.beyond])) return true;
        return calls.refuse("relskew: `beyond` must be \"error\", \"clip\" or \"zero\"");
    }

private:
    bool is_there(Status *missing) const {
        if (missing) ort.free_status()(missing);
        return !missing;
    }

    Index whole(const Info *info, const char *name, Index otherwise) const {
        Index found = 0;
        return is_there(ort.whole()(info, name, &found)) ? found : otherwise;
    }

    // A number with more digits than a float: the sum of the nearest float and the rest.
    double real(const Info *info, const char *name, double otherwise) const {
        char name_of_rest[32];
        std::snprintf(name_of_rest, sizeof name_of_rest, "%s_rest", name);
        float nearest = 0, rest = 0;
        if (!is_there(ort.real()(info, name, &nearest))) return otherwise;
        if (!is_there(ort.real()(info, name_of_rest, &rest))) rest = 0;
        return static_cast<double>(nearest) + static_cast<double>(rest);
    }
};

}  // namespace
