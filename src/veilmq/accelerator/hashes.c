/* SHA-256 (FIPS 180-4) by the processor's own instructions, and MD5 (RFC 1321).
 *
 * Without those instructions SHA-256 is left to Python, which has OpenSSL's. */

#include "accelerator.h"

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

static const uint32_t ROUNDS[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

int sha256_available(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

__attribute__((target("sha,sse4.1,ssse3")))
static void sha256_blocks(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i cdgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(high, cdgh, 8);
    cdgh = _mm_blend_epi16(cdgh, high, 0xf0);
    for (; blocks > 0; blocks--, data += 64) {
        const __m128i before_abef = abef, before_cdgh = cdgh;
        __m128i words[4];
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds each */
            __m128i sum = _mm_add_epi32(words[i & 3], _mm_load_si128((const __m128i *)(ROUNDS + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            if (i < 12) {
                __m128i next = _mm_sha256msg1_epu32(words[i & 3], words[(i + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(words[(i + 3) & 3], words[(i + 2) & 3], 4));
                words[i & 3] = _mm_sha256msg2_epu32(next, words[(i + 3) & 3]);
            }
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, before_abef);
        cdgh = _mm_add_epi32(cdgh, before_cdgh);
    }
    high = _mm_shuffle_epi32(abef, 0x1b);
    cdgh = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(high, cdgh, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(cdgh, high, 8));
}
#else
int sha256_available(void) { return 0; }
static void sha256_blocks(uint32_t state[8], const uint8_t *data, size_t blocks)
{
    (void)state; (void)data; (void)blocks; /* never called: see sha256_available */
}
#endif

void sha256_begin(Sha256 *hash)
{
    memcpy(hash->state, INITIAL, sizeof INITIAL);
    hash->length = 0;
}

void sha256_add(Sha256 *hash, const uint8_t *data, size_t size)
{
    size_t held = hash->length % 64;
    hash->length += size;
    if (held + size < 64) {
        memcpy(hash->block + held, data, size);
        return;
    }
    if (held) {
        memcpy(hash->block + held, data, 64 - held);
        sha256_blocks(hash->state, hash->block, 1);
        data += 64 - held;
        size -= 64 - held;
    }
    sha256_blocks(hash->state, data, size / 64);
    memcpy(hash->block, data + size / 64 * 64, size % 64);
}

void sha256_end(Sha256 *hash, uint8_t digest[SHA256_BYTES])
{
    size_t held = hash->length % 64;
    uint64_t bits = hash->length * 8;
    hash->block[held++] = 0x80;
    if (held > 56) {
        memset(hash->block + held, 0, 64 - held);
        sha256_blocks(hash->state, hash->block, 1);
        held = 0;
    }
    memset(hash->block + held, 0, 56 - held);
    for (int i = 0; i < 8; i++)
        hash->block[56 + i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_blocks(hash->state, hash->block, 1);
    for (int i = 0; i < 32; i++)
        digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - i % 4 * 8));
}

static const uint32_t SINES[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};
static const uint8_t SHIFTS[16] = {7, 12, 17, 22, 5, 9, 14, 20, 4, 11, 16, 23, 6, 10, 15, 21};

static inline uint32_t little_endian(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void md5_block(uint32_t state[4], const uint8_t *data)
{
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
#pragma GCC unroll 64
    for (int i = 0; i < 64; i++) {
        uint32_t mixed, turned;
        int word;
        if (i < 16) {
            mixed = d ^ (b & (c ^ d));
            word = i;
        } else if (i < 32) {
            mixed = c ^ (d & (b ^ c));
            word = (5 * i + 1) % 16;
        } else if (i < 48) {
            mixed = b ^ c ^ d;
            word = (3 * i + 5) % 16;
        } else {
            mixed = c ^ (b | ~d);
            word = 7 * i % 16;
        }
        int shift = SHIFTS[i / 16 * 4 + i % 4];
        mixed += a + SINES[i] + little_endian(data + 4 * word);
        turned = mixed << shift | mixed >> (32 - shift);
        a = d;
        d = c;
        c = b;
        b += turned;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
}

void md5(const uint8_t *data, size_t size, uint8_t digest[MD5_BYTES])
{
    uint32_t state[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
    uint8_t last[128] = {0};
    size_t whole = size / 64 * 64, held = size - whole, padded = held < 56 ? 64 : 128;
    uint64_t bits = (uint64_t)size * 8;
    for (size_t at = 0; at < whole; at += 64)
        md5_block(state, data + at);
    memcpy(last, data + whole, held);
    last[held] = 0x80;
    for (int i = 0; i < 8; i++)
        last[padded - 8 + i] = (uint8_t)(bits >> (8 * i));
    md5_block(state, last);
    if (padded == 128)
        md5_block(state, last + 64);
    for (int i = 0; i < 16; i++)
        digest[i] = (uint8_t)(state[i / 4] >> (i % 4 * 8));
}

void write_hex(uint8_t *to, const uint8_t *from, size_t size)
{
    static const char digits[16] = "0123456789abcdef";
    for (size_t i = 0; i < size; i++) {
        *to++ = (uint8_t)digits[from[i] >> 4];
        *to++ = (uint8_t)digits[from[i] & 15];
    }
}
