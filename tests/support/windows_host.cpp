// A host without Python: causal and full calls with a table, on several threads, compared with the formula in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "relskew.h"

constexpr int HEADS = 8, LENGTH = 300, WIDTH = 32;

template <class T>
static relskew_array array(std::vector<T> &x, int first) {
    relskew_array made{};
    made.data = x.data(), made.axes = 3;
    made.sizes[0] = first, made.sizes[1] = static_cast<int>(x.size()) / first / WIDTH, made.sizes[2] = WIDTH;
    made.steps[0] = made.sizes[1] * WIDTH, made.steps[1] = WIDTH, made.steps[2] = 1;
    return made;
}

template <class T>
static bool is_right(relskew_type type, double gate, bool causal) {
    std::vector<T> q(HEADS * LENGTH * WIDTH), k(q), v(q), out(q), on_one(q), table((2 * LENGTH - 1) * WIDTH);
    unsigned state = 1;
    for (auto *x : {&q, &k, &v, &table})
        for (T &number : *x) number = static_cast<T>(((state = state * 1664525u + 1013904223u) >> 8) / 8388608. - 1);
    relskew_call call = relskew_new_call();
    call.type = type, call.causal = causal, call.left = call.right = LENGTH - 1;
    call.q = array(q, HEADS), call.k = array(k, HEADS), call.v = array(v, HEADS), call.rel_k = array(table, 1);
    char error[200] = "";
    call.out = array(on_one, HEADS);
    bool right = !relskew_attention(&call, error, sizeof error);
    for (int threads : {2, 3, 7, 2, 3, 7}) {
        call.threads = threads, call.out = array(out, HEADS), std::fill(out.begin(), out.end(), T{});
        right = right && !relskew_attention(&call, error, sizeof error) && out == on_one;
    }
    double worst = 0;
    for (int row = 0; row < HEADS * LENGTH; row++) {
        const int head = row / LENGTH, i = row % LENGTH, keys = causal ? i + 1 : LENGTH;
        std::vector<double> weights(keys), expected(WIDTH);
        double sum = 0;
        for (int j = 0; j < keys; j++) {
            double logit = 0;
            for (int d = 0; d < WIDTH; d++)
                logit += double(q[row * WIDTH + d]) *
                         (double(k[(head * LENGTH + j) * WIDTH + d]) + double(table[(j - i + LENGTH - 1) * WIDTH + d]));
            sum += weights[j] = std::exp(logit / std::sqrt(double(WIDTH)));
        }
        for (int j = 0; j < keys; j++)
            for (int d = 0; d < WIDTH; d++) expected[d] += weights[j] / sum * v[(head * LENGTH + j) * WIDTH + d];
        for (int d = 0; d < WIDTH; d++) worst = std::max(worst, std::fabs(expected[d] - out[row * WIDTH + d]));
    }
    std::printf("%d bytes, causal %d: %s, error %.1e %s\n", int(sizeof(T)), causal, right ? "equal" : "unequal", worst,
                error);
    return right && worst < gate;
}

int main() {
    bool right = true;
    for (bool causal : {false, true})
        right =
            is_right<float>(RELSKEW_FLOAT32, 1e-5, causal) & is_right<double>(RELSKEW_FLOAT64, 1e-13, causal) & right;
    return right ? 0 : 1;
}
