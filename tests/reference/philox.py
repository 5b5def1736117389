"""Philox 4×32-10 with Python integers (Salmon et al., SC 2011, section 4.2)."""

_MASK = 2**32 - 1


def block(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Four 32-bit words of output for four of counter and two of key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (
            (right >> 32) ^ x1 ^ k0,
            right & _MASK,
            (left >> 32) ^ x3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3


def words(key: int, counter: int, count: int) -> list[int]:
    """`count` 64-bit values of the stream that begins at a 128-bit counter, two a block."""
    values = []
    for position in range(counter, counter + (count + 1) // 2):
        quarters = tuple(position >> shift & _MASK for shift in (0, 32, 64, 96))
        x0, x1, x2, x3 = block(quarters, (key & _MASK, key >> 32))
        values += [x0 | x1 << 32, x2 | x3 << 32]
    return values[:count]
