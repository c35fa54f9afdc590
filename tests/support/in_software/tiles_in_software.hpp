// The tile registers of AMX as memory, for tests on processors that have none. amx.hpp includes this file. Tiles that
// are used before they are configured end the process, as they do on a processor.

struct Tiles {
    static constexpr int OF_ALL = 8, ROWS = 16;
    bool configured;
    alignas(64) Real at[OF_ALL][ROWS][LANES];
};
inline thread_local Tiles tiles;

inline int rows_of(int tile) { return tile > LEFT ? TILE_PAIRS : TILE_ROWS; }

template <int TILE>
inline auto &tile() {
    if (!tiles.configured) __builtin_trap();
    return tiles.at[TILE];
}

inline void configure_tiles() { tiles = {}, tiles.configured = true; }
inline void release_tiles() { tiles = {}; }

template <int TILE>
inline void clear_tile() {
    std::memset(tile<TILE>(), 0, sizeof(tiles.at[TILE]));
}

template <int TILE>
inline void load_tile(const void *from, Index step) {
    clear_tile<TILE>();
    for (int i = 0; i < rows_of(TILE); i++)
        std::memcpy(tile<TILE>()[i], static_cast<const char *>(from) + i * step, sizeof(Vec));
}

template <int TILE>
inline void store_tile(void *to, Index step) {
    for (int i = 0; i < rows_of(TILE); i++)
        std::memcpy(static_cast<char *>(to) + i * step, tile<TILE>()[i], sizeof(Vec));
}

template <int TO, int RIGHT>
inline void multiply_tiles() {
    for (int i = 0; i < TILE_ROWS; i++) {
        Vec sum = load(tile<TO>()[i]);
        for (int k = 0; k < TILE_PAIRS; k++)
            sum = add_pairs(reinterpret_cast<const BFloat16 *>(tile<LEFT>()[i] + k), load(tile<RIGHT>()[k]), sum);
        store(tile<TO>()[i], sum);
    }
}
