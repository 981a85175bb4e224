"""Triton kernels: the independent second implementation of the elementwise ops, imported only when one of them is chosen.

Every rounding is an explicit conversion, and every launch switches fp fusion off: otherwise the compiler folds a bf16 product, its
rounding and the following sum into one fma, which rounds once where the contract rounds twice.
"""
