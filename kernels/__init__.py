"""The ops of the pack: byte-exact fusions of MiniMax H3's transformer block. See each module's docstring for its contract.

For inference: the fast backends record no gradients.
"""
