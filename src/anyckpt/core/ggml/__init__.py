"""ggml's block types: their table, their values (dequantize) and their bytes (quantize). numpy only, no I/O.

types       ids, sizes and byte order of every type; importing it registers them in `core.dtypes`
unpack      blocks -> float32, exactly as ggml's reference does
pack*       float32 -> blocks, byte for byte what ggml's reference writes
native      the same by the `libgguf` wheel, where it is installed
op          the lazy operation that a writer puts on a tensor
"""
