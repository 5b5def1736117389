"""A study of shuffled DP-SGD: what its theorem claims, what an attacker gets, what shuffling costs.

`theory` computes the paper's figures, `attack` undoes permutations from released weights,
`training` compares training with and without shuffling, `pictures` draws, `page` writes what was
found, and `study` runs what is missing.
"""
