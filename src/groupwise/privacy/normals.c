/* The draws of cpu_noise.py, four times as fast as by numpy, and equal to its own but for the last two bits.
 *
 * Compiled when the package is installed, where there is a compiler; nothing here needs Python's headers.
 * Loops are plain, so that a compiler turns them into vector instructions; GCC makes one version for each
 * generation of processors, and the fastest is chosen when the library is loaded.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

static inline float as_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

/* sin t for t in [0, pi/2], to 2e-7 of its value. */
static inline float sine(float t)
{
    float s = t * t, p = -2.3889859e-8f;
    p = p * s + 2.7525562e-6f;
    p = p * s - 1.9840874e-4f;
    p = p * s + 8.3333310e-3f;
    p = p * s - 1.6666667e-1f;
    return t + t * s * p;
}

/* ln u for u in (0, 1), to 1e-14 of its value: the exponent, and the series of artanh for a mantissa in [sqrt(1/2), sqrt 2). */
static inline double logarithm(double u)
{
    const uint64_t root = 0x3fe6a09e667f3bcdu, one = 0x3ff0000000000000u;
    uint64_t bits, shifted;
    memcpy(&bits, &u, 8);
    shifted = bits + (one - root);
    bits = (shifted & 0x000fffffffffffffu) + root;
    double mantissa, exponent = (double)((int64_t)(shifted >> 52) - 1023);
    memcpy(&mantissa, &bits, 8);
    double f = (mantissa - 1.0) / (mantissa + 1.0), s = f * f, p = 2.0 / 17;
    for (int k = 15; k >= 3; k -= 2)
        p = p * s + 2.0 / k;
    return exponent * 0.69314718055994530942 + (2.0 * f + f * s * p);
}

/* Words of SFC64, as numpy draws them: state is a, b, c and the counter. */
void random_words(uint64_t state[4], uint64_t *words, size_t count)
{
    uint64_t a = state[0], b = state[1], c = state[2], counter = state[3];
    for (size_t i = 0; i < count; i++) {
        uint64_t word = a + b + counter++;
        a = b ^ (b >> 11);
        b = c + (c << 3);
        c = ((c << 24) | (c >> 40)) + word;
        words[i] = word;
    }
    state[0] = a, state[1] = b, state[2] = c, state[3] = counter;
}

/* n pairs of normals, (2n,), for radii (n,) and angles (n,): what cpu_noise.box_muller returns. */
VECTORISED void box_muller(const int64_t *restrict radii, const uint32_t *restrict angles, float *restrict drawn, size_t n)
{
    const float unit = 1.4629180792671596e-9f; /* of an angle: pi / 2^31 */
    float *restrict sines = drawn, *restrict cosines = drawn + n;
    for (size_t i = 0; i < n; i++) {
        double u = fabs((double)radii[i] * (0x1p-63 * (1.0 - 0x1p-53))) + 0x1p-64;
        float radius = sqrtf(-2.0f * (float)logarithm(u));
        uint32_t word = angles[i];
        int32_t angle = (int32_t)(word & 0x3fffffffu), rest = angle ^ 0x3fffffff;
        float one = sine(((float)angle + 0.5f) * unit) * radius;
        float other = sine(((float)rest + 0.5f) * unit) * radius;
        sines[i] = as_float(bits_of(one) ^ (word & 0x80000000u));
        cosines[i] = as_float(bits_of(other) ^ ((word << 1) & 0x80000000u));
    }
}

/* sums = (sums + std * drawn) / divisor */
VECTORISED void add_scaled(float *restrict sums, const float *restrict drawn, float std, float divisor, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sums[i] = (sums[i] + std * drawn[i]) / divisor;
}
