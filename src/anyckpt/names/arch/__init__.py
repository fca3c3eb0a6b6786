"""Architectures as tables, one module each; a new architecture is one table here and nothing else.

The hub is the Hugging Face name. Megatron's and GGUF's names are columns: a rule says which Hugging Face tensors make
up the other family's tensor, through which bijection, and how tensor parallelism splits it.
"""
