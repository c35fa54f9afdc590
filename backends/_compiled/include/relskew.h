/* Relative-position attention on CPUs, forward, for hosts without Python: link with librelskew.so, or open it. */
#ifndef RELSKEW_H
#define RELSKEW_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum relskew_type { RELSKEW_FLOAT32 = 1, RELSKEW_FLOAT64 = 2, RELSKEW_FLOAT16 = 3, RELSKEW_BFLOAT16 = 4 };

/* The treatment of positions beyond a table's rows: the call fails, the edge row is repeated, or zeros are used. */
enum relskew_beyond { RELSKEW_ERROR = 0, RELSKEW_CLIP = 1, RELSKEW_ZERO = 2 };

/* An array of up to four axes, by default (batch, heads, length, width). Leading axes of length 1 may be omitted. Steps
 * are in entries; that of the last axis must be 1. `data` is NULL for an array that is not given. */
typedef struct relskew_array {
    void *data;
    int32_t axes;
    int64_t sizes[4], steps[4];
} relskew_array;

/* One call: logits[i, j] = scale q_i k_j + rel_scale rel_q_i rel_k[r] + k_j key_table[r] + rel_bias[r] + mask[i, j]
 * with r = j - (i + offset), and out_i = sum_j softmax_j(logits) (v_j + rel_v[r]). Start from relskew_new_call(). */
typedef struct relskew_call {
    size_t size;          /* sizeof(relskew_call): later versions may have more */
    int32_t type;         /* of all arrays, unless stated otherwise */
    int32_t threads;      /* the most threads; 0 means 1 */
    int64_t left, right;  /* row 0 of a table is for r = -left, its last one for r = right */
    int32_t beyond;       /* enum relskew_beyond */
    int32_t causal;       /* a query sees r <= 0 */
    int64_t window_left, window_right;  /* and -window_left <= r <= window_right; -1: no bound */
    int64_t block_size;                 /* and the block of this size that contains it; 0: no blocks */
    int64_t blocks_before;              /* and this many whole blocks before; -1: one, and causal */
    int64_t offset;                     /* the position of query 0 */
    double scale, rel_scale;            /* NAN: width ** -0.5, and the same as scale */
    double softcap;                     /* 0: none */
    int32_t mask_adds;                  /* 1: the mask is added; 0: it has bytes, 1 for visible keys */

    relskew_array q, k, v;               /* (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv); Hkv divides H */
    relskew_array k_scale, v_scale;      /* (B, Hkv, Lk), float: if given, k and v are int8, times these */
    relskew_array rel_k, rel_v;          /* (1 or H, R, D), (1 or H, R, Dv) with R = left + right + 1 */
    relskew_array rel_k_scale, rel_v_scale;  /* (1 or H, R), float: if given, that table is int8, times these */
    relskew_array rel_bias;              /* (1 or H, R) */
    relskew_array rel_q;                 /* (B, H, Lq, D of rel_k), q by default */
    relskew_array key_table;             /* (1 or H, R, D): a table that is multiplied by keys */
    relskew_array mask;                  /* axes as of the logits, or 1 */
    relskew_array sinks;                 /* (H) or (B, H, Lq): one more logit in each row's softmax, without a value */
    relskew_array q_segments, k_segments;    /* int64, (1 or B, Lq) and (1 or B, Lk): a query sees its segment */
    relskew_array q_positions, k_positions;  /* int64, the same shapes: r is a key's minus a query's; no offset */
    relskew_array out;                   /* (B, H, Lq, Dv), written */
    relskew_array lse;                   /* (B, H, Lq), written: log-sum-exp, float, or double of RELSKEW_FLOAT64 */
} relskew_call;

/* Return a call with the defaults. */
static inline relskew_call relskew_new_call(void) {
    relskew_call call;
    memset(&call, 0, sizeof call);
    call.size = sizeof call, call.type = RELSKEW_FLOAT32, call.threads = 1;
    call.window_left = call.window_right = call.blocks_before = -1;
    call.scale = call.rel_scale = NAN;
    return call;
}

/* Compute one call. Returns 0, or 1 after writing a message of at most `length` bytes, including the final zero, to
 * `error`. Any number of threads may call at the same time. */
int relskew_attention(const relskew_call *call, char *error, size_t length);

#ifdef __cplusplus
}
#endif

#endif
