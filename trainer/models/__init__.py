"""The built-in models, `wrap` for plain PyTorch modules, and the checks that every model must pass.

It imports errors only from trainer. Begin with `dlrm`, then `checking` and `wrapping`.
"""
